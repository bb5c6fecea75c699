"""Cells to compare, and how close two implementations of one must be: the only table of bounds.

Legend: B rows, T time, D width, E input width, G all gates side by side.
"""

from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from reprise.kernels.reference import GruWeights, LstmWeights

# Relative root mean square of the difference, by the format of the products.
BOUNDS = {torch.float64: 1e-12, torch.float32: 4e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}

LENGTHS = (1, 2, 63, 64, 65, 257)


@dataclass(frozen=True)
class CellCase:
    """One cell: its kind and its switches."""

    kind: str
    coupled_gates: bool = False
    layer_norm: bool = False
    temporal_residual: bool = False

    def __str__(self) -> str:
        names = [name for name in ("coupled_gates", "layer_norm", "temporal_residual") if getattr(self, name)]
        return "-".join([self.kind, *names])

    @property
    def is_textbook(self) -> bool:
        return not (self.coupled_gates or self.layer_norm or self.temporal_residual)

    def arguments(self) -> dict[str, bool]:
        return {} if self.kind == "gru" else {"coupled_gates": self.coupled_gates}


_ON_OFF = (False, True)
LSTM_CASES = tuple(CellCase("lstm", *switches) for switches in product(_ON_OFF, repeat=3))
GRU_CASES = tuple(CellCase("gru", False, *switches) for switches in product(_ON_OFF, repeat=2))
ALL_CASES = LSTM_CASES + GRU_CASES
# Everything off and everything on, of both kinds: what the long lengths are run with.
CORNER_CASES = (LSTM_CASES[0], LSTM_CASES[-1], GRU_CASES[0], GRU_CASES[-1])


def make_inputs(
    case: CellCase, dtype: torch.dtype, *, num_rows: int = 3, num_steps: int = 9, width_in: int = 5, width: int = 8
) -> tuple[Tensor, tuple[Tensor, ...], LstmWeights | GruWeights]:
    """Input, non-zero initial state and weights, all of them leaves that want gradients."""
    generator = torch.Generator().manual_seed(num_steps)
    num_gates = 4 if case.kind == "lstm" and not case.coupled_gates else 3

    def leaf(*shape: int, scale: float = 1.0, shift: float = 0.0, kept: bool = False) -> Tensor:
        values = torch.randn(*shape, generator=generator, dtype=torch.float64) * scale + shift
        wanted = torch.promote_types(dtype, torch.float32) if kept else dtype
        return values.to(wanted).requires_grad_()

    x_BTE = leaf(num_rows, num_steps, width_in)
    state = tuple(leaf(num_rows, width, kept=True) for _ in range(2 if case.kind == "lstm" else 1))
    parts: list[Any] = [
        leaf(num_gates * width, width_in, scale=width_in**-0.5),
        leaf(num_gates * width, width, scale=0.8 * width**-0.5),
        leaf(num_gates * width, scale=0.2),
    ]
    if case.kind == "gru":
        parts.append(leaf(width, scale=0.2))
    parts += [leaf(width, scale=0.2, shift=1.0), leaf(width, scale=0.2)] if case.layer_norm else [None, None]
    parts.append(leaf(width, scale=0.2, shift=0.3) if case.temporal_residual else None)
    return x_BTE, state, LstmWeights(*parts) if case.kind == "lstm" else GruWeights(*parts)


def make_resets(num_rows: int, num_steps: int) -> Tensor:
    """Some rows anew at some positions: at the first one, in the middle, two at once, one twice in a row."""
    reset_BT = torch.zeros(num_rows, num_steps, dtype=torch.bool)
    reset_BT[0, 0] = True
    reset_BT[1, num_steps // 2 :] = torch.arange(num_steps - num_steps // 2) < 2
    reset_BT[-1, num_steps // 2] = True
    return reset_BT


def outcome(
    kernels: Any,
    case: CellCase,
    inputs: tuple[Tensor, tuple[Tensor, ...], LstmWeights | GruWeights],
    reset_BT: Tensor | None,
) -> dict[str, Tensor]:
    """Outputs, final state and the gradients of a random weighting of both by every input, by name."""
    x_BTE, state, weights = inputs
    y_BTD, last = getattr(kernels, case.kind)(x_BTE, state, reset_BT, weights, **case.arguments())
    generator = torch.Generator().manual_seed(1)
    weighted = [
        (part.double() * torch.randn(part.shape, generator=generator, dtype=torch.float64)).sum()
        for part in (y_BTD, *last)
    ]
    leaves = {"x": x_BTE, **{f"state{index}": part for index, part in enumerate(state)}}
    leaves |= {name: part for name, part in weights._asdict().items() if part is not None}
    gradients = torch.autograd.grad(torch.stack(weighted).sum(), list(leaves.values()))
    results = {"y": y_BTD, **{f"last{index}": part for index, part in enumerate(last)}}
    results |= {f"gradient of {name}": part for name, part in zip(leaves, gradients, strict=True)}
    return {name: part.detach() for name, part in results.items()}


def relative_rms(value: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference over that of `expected`; 0 where both are zero."""
    difference = (value.double() - expected.double()).square().mean().sqrt()
    return float(difference / expected.double().square().mean().sqrt().clamp_min(1e-30))


def assert_close(value: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Every named tensor within the bound of `dtype`, with the same shapes and formats."""
    assert value.keys() == expected.keys()
    for name, part in value.items():
        assert part.shape == expected[name].shape, name
        assert part.dtype == expected[name].dtype, name
        assert relative_rms(part, expected[name]) <= BOUNDS[dtype], f"{name}: {relative_rms(part, expected[name])}"
