"""Which implementation of a kernel runs: picked by name, said once, refused by name, never silently exchanged."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from reprise.kernels import (
    attention,
    cpu,
    cpu_loss,
    cpu_scan,
    eager,
    gpu,
    library,
    loss,
    native,
    reference,
    reference_attention,
    reference_scan,
    scan,
)
from reprise.runtime import UserError, say

Kernel = Callable[..., Any]

KERNELS: dict[str, dict[str, Kernel]] = {
    "lstm": {
        "native": cpu.lstm,
        "library": library.lstm,
        "triton": gpu.lstm,
        "eager": eager.lstm,
        "reference": reference.lstm,
    },
    "gru": {
        "native": cpu.gru,
        "library": library.gru,
        "triton": gpu.gru,
        "eager": eager.gru,
        "reference": reference.gru,
    },
    "attention": {"library": attention.attention, "reference": reference_attention.attention},
    "document_attention": {
        "library": attention.document_attention,
        "reference": reference_attention.document_attention,
    },
    "linear_scan": {
        "native": cpu_scan.linear_scan,
        "triton": gpu.linear_scan,
        "eager": scan.linear_scan,
        "reference": reference_scan.linear_scan,
    },
    "mingru": {
        "native": cpu_scan.mingru,
        "triton": gpu.mingru,
        "eager": scan.mingru,
        "reference": reference_scan.mingru,
    },
    "minlstm": {
        "native": cpu_scan.minlstm,
        "triton": gpu.minlstm,
        "eager": scan.minlstm,
        "reference": reference_scan.minlstm,
    },
    "rglru": {
        "native": cpu_scan.rglru,
        "triton": gpu.rglru,
        "eager": scan.rglru,
        "reference": reference_scan.rglru,
    },
    "linear_cross_entropy": {
        "native": cpu_loss.linear_cross_entropy,
        "eager": loss.linear_cross_entropy,
        "reference": reference.linear_cross_entropy,
    },
}
IMPLEMENTATIONS = ("auto", "native", "triton", "library", "eager", "reference")


@cache
def pick(name: str, device: str, dtype: torch.dtype, implementation: str, *, switches: tuple[str, ...] = ()) -> Kernel:
    """The kernel `name` for a device type and a product format. Says what it picked the first time it is asked.

    `switches` are the options that are on and that only our own implementations have, a recurrence that is not full
    ("block", "diagonal") among them. `auto` takes the first that runs here: on a CPU native code, on a GPU the
    library's where no switch is on and else Triton's; then the library's, then eager. Raises UserError for an unknown
    name or implementation, and for an implementation that lacks the kernel or the switches, or does not run here.
    """
    if name not in KERNELS:
        raise UserError(f"kernel={name}: unknown; allowed: {', '.join(KERNELS)}")
    if implementation not in IMPLEMENTATIONS:
        raise UserError(f"implementation={implementation}: unknown; allowed: {', '.join(IMPLEMENTATIONS)}")
    available = KERNELS[name]
    obstacles = {choice: _known_obstacle(choice, name, device, dtype, switches) for choice in available}
    chosen, asked = implementation, ""
    if implementation == "auto":
        # The library has no resets: it runs a window in as many pieces as there are positions with one.
        order = [*(["native"] if device == "cpu" else []), "library", "triton", "eager", "reference"]
        usable = [choice for choice in order if choice in available and obstacles[choice] is None]
        chosen = usable[0]
        missed = obstacles.get("triton") if chosen == "eager" and device == "cuda" else None
        asked = f" (auto: {missed})" if missed else " (auto)"
    others = ", ".join(choice for choice in available if obstacles[choice] is None)
    if chosen not in available:
        raise UserError(f"implementation={chosen}: has no {name}; allowed: auto, {others}")
    if obstacles[chosen] is not None:
        raise UserError(f"implementation={chosen}: {obstacles[chosen]}; allowed: auto, {others}")
    option_text = f" with {', '.join(switches)}" if switches else ""
    _announce(
        f"kernel {name}{option_text}: {chosen}{asked} on {device}, products in {str(dtype).removeprefix('torch.')}"
    )
    return available[chosen]


def _obstacle(implementation: str, name: str, device: str, dtype: torch.dtype, switches: tuple[str, ...]) -> str | None:
    """Why an implementation does not run here, in a few words, or None where it does."""
    if implementation == "library" and switches:
        return f"the library's {name} has no {', '.join(switches)}"
    if implementation == "triton":
        return gpu.obstacle(device)
    return native.obstacle(device, dtype) if implementation == "native" else None


# What torch.compile neither traces nor asks again: a machine does not change.
_constant: Callable[[Callable[..., Any]], Callable[..., Any]] = torch.compiler.assume_constant_result
_announce, _known_obstacle = _constant(say), _constant(_obstacle)
