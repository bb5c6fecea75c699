"""Attention over a window equals the loop over positions that defines it: outputs, cache and all gradients.

Legend: B rows, T time, C slots of the cache, D width.
"""

from types import ModuleType

import pytest
import torch
from kernel_cases import LENGTHS, assert_close, make_resets
from torch import Tensor

from reprise.kernels import attention, reference_attention
from reprise.kernels.products import state_dtype

NUM_HEADS, WIDTH, NUM_ROWS = 2, 12, 3
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def make_parts(dtype: torch.dtype, num_steps: int) -> list[Tensor]:
    """Query, key and value, leaves that want gradients."""
    generator = torch.Generator().manual_seed(num_steps)
    shape = (NUM_ROWS, num_steps, WIDTH)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for _ in range(3)]


def make_cache(dtype: torch.dtype, context: int) -> tuple[Tensor, Tensor, Tensor]:
    """An empty cache, one with a single position, and a full one."""
    filled_B = torch.tensor([0, 1, context])
    empty_BC = torch.arange(context) < (context - filled_B).unsqueeze(1)
    generator = torch.Generator().manual_seed(context)
    parts = []
    for _ in range(2):
        # Values that a cache of this format can hold.
        values_BCD = torch.randn(NUM_ROWS, context, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
        parts.append(values_BCD.to(state_dtype(dtype)).masked_fill(empty_BC.unsqueeze(-1), 0.0).requires_grad_())
    return parts[0], parts[1], filled_B.to(state_dtype(dtype))


def gradients(outputs: list[Tensor], leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of a random weighting of the outputs."""
    generator = torch.Generator().manual_seed(1)
    weighted = [
        (part.double() * torch.randn(part.shape, generator=generator, dtype=torch.float64)).sum() for part in outputs
    ]
    found = torch.autograd.grad(torch.stack(weighted).sum(), list(leaves.values()))
    return {f"gradient of {name}": gradient for name, gradient in zip(leaves, found, strict=True)}


@pytest.mark.parametrize("context", [4, 100])
@pytest.mark.parametrize("num_steps", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_equals_the_loop(dtype: torch.dtype, num_steps: int, context: int) -> None:
    reset_BT = make_resets(NUM_ROWS, num_steps)
    results = []
    for kernels in (attention, reference_attention):
        parts, state = make_parts(dtype, num_steps), make_cache(dtype, context)
        y_BTD, last = kernels.attention(*parts, state, reset_BT, num_heads=NUM_HEADS)
        leaves = dict(zip(("query", "key", "value", "cached keys", "cached values"), [*parts, *state[:2]], strict=True))
        found = {"y": y_BTD, "keys": last[0], "values": last[1], "filled": last[2]}
        results.append({name: part.detach() for name, part in found.items()})
        results[-1] |= gradients([y_BTD, last[0], last[1]], leaves)
    assert torch.equal(results[0]["filled"], results[1]["filled"])
    assert_close(results[0], results[1], dtype)


@pytest.mark.parametrize("has_resets", [True, False])
@pytest.mark.parametrize("num_steps", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_document_attention_equals_the_loop(dtype: torch.dtype, num_steps: int, has_resets: bool) -> None:
    reset_BT = make_resets(NUM_ROWS, num_steps) if has_resets else None
    results = []
    for kernels in (attention, reference_attention):
        parts = make_parts(dtype, num_steps)
        y_BTD = kernels.document_attention(*parts, reset_BT, num_heads=NUM_HEADS)
        results.append({"y": y_BTD.detach(), **gradients([y_BTD], dict(zip(("q", "k", "v"), parts, strict=True)))})
    assert_close(results[0], results[1], dtype)


@pytest.mark.parametrize("kernels", [attention, reference_attention])
def test_gradients_are_those_of_finite_differences(kernels: ModuleType) -> None:
    *parts, keys_BCD, values_BCD = [*make_parts(torch.float64, 4), *make_cache(torch.float64, 3)[:2]]
    filled_B, reset_BT = make_cache(torch.float64, 3)[2], make_resets(NUM_ROWS, 4)

    def outputs(*leaves: Tensor) -> tuple[Tensor, ...]:
        state = (leaves[3], leaves[4], filled_B)
        y_BTD, last = kernels.attention(*leaves[:3], state, reset_BT, num_heads=NUM_HEADS)
        return y_BTD, last[0], last[1]

    # The empty slots of the cache are nobody's inputs: the loop and the window both leave their gradient at zero.
    assert torch.autograd.gradcheck(outputs, (*parts, keys_BCD, values_BCD), atol=1e-6, fast_mode=True)
