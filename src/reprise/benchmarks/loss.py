"""`benchmark=loss`: output layer with cross-entropy, forward and backward, against full logits and the library's own.

Legend: N tokens, C tokens of a chunk, D width, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from reprise.benchmarks.config import BenchmarkConfig
from reprise.benchmarks.machine import Place, short_name
from reprise.benchmarks.memory import Growth, is_measurable, measure_growth
from reprise.benchmarks.outcome import Outcome, plain_table, rates_table
from reprise.benchmarks.timing import Side, Spread, Timings, interleave, speed_ratio
from reprise.benchmarks.windows import implementation_of
from reprise.kernels import reference
from reprise.kernels.dispatch import pick
from reprise.runtime import say

KERNEL = "linear_cross_entropy"
# Rounding of full logits in fp64 needs no more than this many tokens at once.
_EXACT_CHUNK_TOKENS = 512
# Memory is measured at the main number of tokens and at this many times it.
_MORE_TOKENS = 4
_WARMUP_TOKENS = 32

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Layer:
    """Hidden states [N, D], weight [V, D] and bias [V] that want gradients, and targets [N]."""

    hidden_ND: Tensor
    weight_VD: Tensor
    bias_V: Tensor
    targets_N: Tensor

    @classmethod
    def random(cls, num_tokens: int, width: int, vocab_size: int, *, device: torch.device) -> "Layer":
        """A normed hidden state and logits with a variance of one, as at the start of training."""
        generator = torch.Generator().manual_seed(vocab_size)
        hidden_ND = torch.randn(num_tokens, width, generator=generator)
        weight_VD = torch.randn(vocab_size, width, generator=generator) * width**-0.5
        bias_V = torch.randn(vocab_size, generator=generator) * 0.1
        targets_N = torch.randint(vocab_size, (num_tokens,), generator=generator).to(device)
        leaves = [part.to(device).requires_grad_() for part in (hidden_ND, weight_VD, bias_V)]
        return cls(leaves[0], leaves[1], leaves[2], targets_N)

    def read_as(self, product: torch.dtype) -> "Layer":
        """The same with hidden states as a layer in `product` hands them on; parameters stay fp32."""
        hidden_ND = self.hidden_ND.detach().to(product).requires_grad_()
        return Layer(hidden_ND, self.weight_VD, self.bias_V, self.targets_N)

    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        """What gradients are asked of: hidden states, weight, bias."""
        return self.hidden_ND, self.weight_VD, self.bias_V


@dataclass(frozen=True)
class Rival:
    """A way to the summed loss of a layer, with products in `product`."""

    name: str
    loss: Loss
    product: torch.dtype
    implementation: str

    def outcome(self, layer: Layer, place: Place) -> tuple[Tensor, ...]:
        """The loss and the gradients of hidden states, weight and bias."""
        with place.autocast(self.product):
            total = self.loss(*layer.leaves(), layer.targets_N)
        return total, *torch.autograd.grad(total, layer.leaves())


def measure(settings: BenchmarkConfig, place: Place) -> Outcome:
    """Speed, how far loss and gradients are from fp64, and memory at two numbers of tokens."""
    num_tokens, width, vocab_size = settings.num_tokens, settings.width, settings.vocab_size
    say(f"measuring {num_tokens} tokens x {width} x {vocab_size} words")
    layer = Layer.random(num_tokens, width, vocab_size, device=place.device)
    found = rivals(place)
    exact = exact_outcome(layer)
    sides = []
    errors: list[dict[str, Any]] = []
    for rival in found:
        own_layer = layer.read_as(rival.product)
        error = {"side": rival.name} | errors_of(rival.outcome(own_layer, place), exact)
        errors.append(error)
        facts = {"width": width, "vocab_size": vocab_size, "products": short_name(rival.product)}
        facts |= {"implementation": rival.implementation}
        sides.append(Side(rival.name, partial(rival.outcome, own_layer, place), num_tokens, facts | error))
    timings = interleave(sides, settings.pace(), synchronise=place.synchronise)
    outcome = Outcome(ratios=_ratios(timings), findings={"errors": errors})
    outcome.add(f"{num_tokens}x{width}x{vocab_size}", timings)
    title = f"{num_tokens} tokens x {width} x {vocab_size} words"
    outcome.tables = [rates_table(title, timings), _errors_table(errors)]
    _add_memory(outcome, settings, place)
    return outcome


def rivals(place: Place) -> list[Rival]:
    """Ours, all logits at once as one writes it by hand, and the library's chunked one where it has one."""
    found = []
    for product in (torch.bfloat16, torch.float32):
        name = short_name(product)
        ours = pick(KERNEL, place.device.type, product, "auto")
        found.append(Rival(f"loss_{name}", ours, product, implementation_of(KERNEL, ours)))
        found.append(Rival(f"full_{name}", full_logits, product, "F.linear, F.cross_entropy"))
        # What came with PyTorch 2.13.
        if hasattr(functional, KERNEL) and hasattr(torch.nn, "LinearCrossEntropyOptions"):
            found.append(Rival(f"library_{name}", partial(library_loss, product), product, f"F.{KERNEL}, chunked"))
    return found


def full_logits(hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor, targets_N: Tensor) -> Tensor:
    """All logits, then the library's cross-entropy."""
    logits_NV = functional.linear(hidden_ND, weight_VD, bias_V)
    return functional.cross_entropy(logits_NV, targets_N, reduction="sum")


def library_loss(
    product: torch.dtype, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor, targets_N: Tensor
) -> Tensor:
    """The library's chunked loss. It takes its tensors in one format and knows no autocast."""
    read = (hidden_ND.to(product), weight_VD.to(product))
    with torch.autocast(hidden_ND.device.type, enabled=False):
        return functional.linear_cross_entropy(
            *read,
            targets_N,
            linear_bias=bias_V.to(product),
            reduction="sum",
            options=torch.nn.LinearCrossEntropyOptions(),
        )


def exact_outcome(layer: Layer) -> tuple[Tensor, ...]:
    """Loss and gradients in fp64, a chunk of tokens at a time; the hidden states as they are before any rounding."""
    hidden_ND, weight_VD, bias_V = (part.detach().double() for part in layer.leaves())
    total = torch.zeros((), dtype=torch.float64, device=hidden_ND.device)
    grad_weight_VD, grad_bias_V = torch.zeros_like(weight_VD), torch.zeros_like(bias_V)
    grads_hidden = []
    for start in range(0, len(hidden_ND), _EXACT_CHUNK_TOKENS):
        chunk = slice(start, start + _EXACT_CHUNK_TOKENS)
        leaves = [part.requires_grad_() for part in (hidden_ND[chunk].clone(), weight_VD.detach(), bias_V.detach())]
        nll = reference.linear_cross_entropy(leaves[0], leaves[1], leaves[2], layer.targets_N[chunk])
        grad_hidden_CD, grad_chunk_VD, grad_chunk_V = torch.autograd.grad(nll, leaves)
        total += nll.detach()
        grad_weight_VD += grad_chunk_VD
        grad_bias_V += grad_chunk_V
        grads_hidden.append(grad_hidden_CD)
    return total, torch.cat(grads_hidden), grad_weight_VD, grad_bias_V


def errors_of(found: Sequence[Tensor], exact: Sequence[Tensor]) -> dict[str, float]:
    """Relative error of the loss, relative root mean square of the gradients' differences."""
    names = ("loss_relative_error", "hidden_gradient_error", "weight_gradient_error", "bias_gradient_error")
    errors = {}
    for name, value, expected in zip(names, found, exact, strict=True):
        difference = (value.detach().double() - expected).square().mean().sqrt()
        errors[name] = float(difference / expected.square().mean().sqrt())
    return errors


def work_of(name: str, num_tokens: int, width: int, vocab_size: int, device: str) -> Callable[[], Any]:
    """One forward and backward of a rival on tensors that are there already: what `memory.py` measures."""
    place = Place(torch.device(device))
    rival = next(rival for rival in rivals(place) if rival.name == name)
    layer = Layer.random(num_tokens, width, vocab_size, device=place.device).read_as(rival.product)
    return partial(rival.outcome, layer, place)


def _ratios(timings: Timings) -> dict[str, Spread]:
    ratios = {"loss_bf16_over_full_fp32": speed_ratio(timings["loss_bf16"], timings["full_fp32"])}
    for name in ("bf16", "fp32"):
        ratios[f"loss_{name}_over_full_{name}"] = speed_ratio(timings[f"loss_{name}"], timings[f"full_{name}"])
        if f"library_{name}" in timings:
            ratios[f"loss_{name}_over_library_{name}"] = speed_ratio(
                timings[f"loss_{name}"], timings[f"library_{name}"]
            )
    return ratios


def _errors_table(errors: list[dict[str, Any]]) -> Table:
    columns = tuple(errors[0])
    rows = [
        tuple(f"{value:.1e}" if isinstance(value, float) else str(value) for value in row.values()) for row in errors
    ]
    return plain_table("distance from fp64", columns, rows)


def _add_memory(outcome: Outcome, settings: BenchmarkConfig, place: Place) -> None:
    """Peak memory of one call at two numbers of tokens, each in a process of its own."""
    if not is_measurable(place.device.type):
        say("memory is not measured: this system has no /proc/self/clear_refs")
        return
    say("measuring memory, each case in a process of its own")
    few, many = settings.num_tokens, _MORE_TOKENS * settings.num_tokens
    rows = []
    found: dict[str, Any] = {}
    for side in ("loss_bf16", "full_fp32"):
        growths = [_growth(side, num_tokens, settings, place) for num_tokens in (few, many)]
        bytes_a_token = (growths[1].peak_bytes - growths[0].peak_bytes) / (many - few)
        peaks = [growth.peak_bytes for growth in growths]
        found[side] = {"tokens": [few, many], "peak_bytes": peaks, "bytes_a_token": bytes_a_token}
        found["counted"] = growths[0].how
        rows.append((side, *(f"{peak / 2**20:.0f}" for peak in peaks), f"{bytes_a_token:,.0f}"))
    outcome.findings["memory"] = found | {"logits_bytes_a_token": 4 * settings.vocab_size}
    columns = ("side", f"MiB at {few} tokens", f"MiB at {many}", "bytes a token between")
    outcome.tables.append(plain_table(f"peak memory ({found['counted']})", columns, rows))


def _growth(side: str, num_tokens: int, settings: BenchmarkConfig, place: Place) -> Growth:
    sizes = (settings.width, settings.vocab_size, place.device.type)
    return measure_growth(
        __name__,
        "work_of",
        arguments=(side, num_tokens, *sizes),
        warmup_arguments=(side, min(num_tokens, _WARMUP_TOKENS), *sizes),
    )
