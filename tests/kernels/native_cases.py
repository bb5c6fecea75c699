"""The native kernels at the sizes that training runs: cells, scans and the loss as functions to call and compare.

Legend: B rows, T time, D width, E input width, G all gates side by side, N tokens, V vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from kernel_cases import ACCURACY, CellCase, Inputs, make_inputs, relative_rms
from torch import Tensor

from reprise.kernels import cpu, cpu_scan
from reprise.kernels.reference_scan import MinimalWeights, RgLruWeights

DTYPES = (torch.float32, torch.bfloat16)
WIDTH, NUM_ROWS, NUM_STEPS = 512, 32, 128
OPTIMIZED = CellCase("lstm", True, True, True)
NORMED_GRU = CellCase("gru", False, True, True)
# Every switch, in all three cells and in all three structures.
REAL_CASES = (
    OPTIMIZED,
    CellCase("lstm", False, True, True),
    NORMED_GRU,
    CellCase("lstm", True, True, True, "block"),
    CellCase("lstm", True, True, True, "diagonal"),
)
# The cells on the scan, and how many gates they have.
SCANNED = {"mingru": 2, "minlstm": 3, "rglru": 3}
# Tensors of fewer numbers make no root mean square to rely on.
_FEWEST_NUMBERS = 32

# (x, state, reset) -> (outputs, last state)
Window = Callable[[Tensor, tuple[Tensor, ...], Tensor | None], tuple[Tensor, tuple[Tensor, ...]]]


def random_resets(num_rows: int, num_steps: int, *, share: float, seed: int = 0) -> Tensor:
    return torch.rand(num_rows, num_steps, generator=torch.Generator().manual_seed(seed)) < share


def too_far(
    value: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype, *, share_of_bound: float = 1.0
) -> dict[str, float]:
    """The relative RMS of every tensor that is not within the bound of `dtype`, or a share of it, by name."""
    assert value.keys() == expected.keys()
    assert all(part.isfinite().all() for part in value.values())
    large = [name for name, part in value.items() if part.numel() >= _FEWEST_NUMBERS]
    errors = {name: relative_rms(value[name], expected[name]) for name in large}
    return {name: error for name, error in errors.items() if error > share_of_bound * ACCURACY[dtype]}


def as_float32(part: Tensor) -> Tensor:
    """The same numbers, a leaf in fp32."""
    return part.detach().float().requires_grad_()


def as_float64(part: Tensor) -> Tensor:
    """The same numbers, a leaf in fp64."""
    return part.detach().double().requires_grad_()


def changed(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """Input, state and weights, each of them changed."""
    x_BTE, state, weights = inputs
    parts: list[Any] = [None if part is None else change(part) for part in weights]
    return change(x_BTE), tuple(change(part) for part in state), type(weights)(*parts)


def gated_window(case: CellCase, dtype: torch.dtype, width: int) -> Window:
    """A cell whose input is the gates' sums themselves.

    Its input weight is the identity: a product of the library's that no order of adding changes.
    """
    weights = make_inputs(case, dtype, num_rows=1, num_steps=1, width=width, width_in=1)[2]
    weights = weights._replace(input_GE=torch.eye(weights.bias_G.numel(), dtype=dtype))
    return partial(getattr(cpu, case.kind), weights=weights, **case.arguments())


def scan_weights(cell: str, dtype: torch.dtype, width: int, width_in: int) -> MinimalWeights | RgLruWeights:
    """Leaves that want gradients; the decays of the RG-LRU are about 0.9 to 0.999 a step."""
    generator = torch.Generator().manual_seed(5)
    num_gates_width = SCANNED[cell] * width
    parts = [
        torch.randn(num_gates_width, width_in, generator=generator) * width_in**-0.5,
        torch.randn(num_gates_width, generator=generator) * 0.3,
    ]
    if cell == "rglru":
        parts.append(torch.randn(width, generator=generator) + 6.0)
    leaves = [part.to(dtype).requires_grad_() for part in parts]
    return RgLruWeights(*leaves) if cell == "rglru" else MinimalWeights(*leaves)


def scanned_window(cell: str, dtype: torch.dtype, width: int) -> Window:
    """A cell on the scan whose input is the gates' sums themselves, as in `gated_window`."""
    weights = scan_weights(cell, dtype, width, width_in=1)
    weights = weights._replace(input_GE=torch.eye(weights.bias_G.numel(), dtype=dtype))

    def run(x_BTG: Tensor, state: tuple[Tensor, ...], reset_BT: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        y_BTD, last = getattr(cpu_scan, cell)(x_BTG, state, reset_BT, weights)
        return y_BTD, last

    return run


class ScanCall:
    """A cell on the native scan over a fixed input: everything that it makes, forward and backward."""

    def __init__(self, cell: str, dtype: torch.dtype, *, num_rows: int, num_steps: int, width: int) -> None:
        generator = torch.Generator().manual_seed(6)
        self._cell, self._weights = cell, scan_weights(cell, dtype, width, width_in=width)
        self._x_BTE = torch.randn(num_rows, num_steps, width, generator=generator).to(dtype).requires_grad_()
        self._initial_BD = torch.randn(num_rows, width, generator=generator).requires_grad_()
        self._reset_BT = random_resets(num_rows, num_steps, share=0.1)

    def __call__(self) -> dict[str, Tensor]:
        kernel = getattr(cpu_scan, self._cell)
        y_BTD, (last_BD,) = kernel(self._x_BTE, (self._initial_BD,), self._reset_BT, self._weights)
        leaves = {"x": self._x_BTE, "initial": self._initial_BD, **self._weights._asdict()}
        gradients = torch.autograd.grad(y_BTD.float().square().sum() + last_BD.sum(), list(leaves.values()))
        return {"y": y_BTD.detach(), "last": last_BD.detach(), **dict(zip(leaves, gradients, strict=True))}


def loss_inputs(
    num_tokens: int, num_words: int, width: int, *, dtype: torch.dtype, seed: int = 0
) -> tuple[list[Tensor], Tensor]:
    """Hidden states, weight and bias of the output layer as leaves, and targets."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((num_tokens, width), (num_words, width), (num_words,))
    leaves = [
        (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype).requires_grad_()
        for shape, scale in zip(shapes, (1.0, width**-0.5, 0.3), strict=True)
    ]
    return leaves, torch.randint(num_words, (num_tokens,), generator=generator)


def loss_outcome(
    kernel: Callable[..., Tensor], leaves: list[Tensor], targets_N: Tensor, **options: Any
) -> dict[str, Tensor]:
    """The loss and its gradients."""
    total = kernel(*leaves, targets_N, **options)
    gradients = torch.autograd.grad(total, leaves)
    return {"loss": total.detach(), **dict(zip(("hidden", "weight", "bias"), gradients, strict=True))}
