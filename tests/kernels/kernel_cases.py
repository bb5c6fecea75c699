"""Cells to compare, and how close implementations must be: to each other and to the reference in float64.

Legend: B rows, T time, D width, E input width, G all gates side by side, K units that a unit hears from.
"""

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from reprise.kernels import reference
from reprise.kernels.reference import GruWeights, LstmWeights

# Relative root mean square of the difference, by the format of the products: between two implementations in it ...
BOUNDS = {torch.float64: 1e-12, torch.float32: 4e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# ... and from the reference in float64 on the same numbers.
ACCURACY = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}

Inputs = tuple[Tensor, tuple[Tensor, ...], LstmWeights | GruWeights]

LENGTHS = (1, 2, 63, 64, 65, 257)

# Heads of the block recurrence.
NUM_HEADS = 2


@dataclass(frozen=True)
class CellCase:
    """One cell: its kind, its switches and the structure of its recurrent product."""

    kind: str
    coupled_gates: bool = False
    layer_norm: bool = False
    temporal_residual: bool = False
    recurrence: str = "full"

    def __str__(self) -> str:
        names = [name for name in ("coupled_gates", "layer_norm", "temporal_residual") if getattr(self, name)]
        return "-".join([self.kind, *names, *([] if self.recurrence == "full" else [self.recurrence])])

    @property
    def is_textbook(self) -> bool:
        return not (self.coupled_gates or self.layer_norm or self.temporal_residual) and self.recurrence == "full"

    def arguments(self) -> dict[str, bool]:
        return {} if self.kind == "gru" else {"coupled_gates": self.coupled_gates}

    def heard_units(self, width: int) -> int:
        """K, the second dimension of the recurrent weight."""
        return {"full": width, "block": width // NUM_HEADS, "diagonal": 1}[self.recurrence]


_ON_OFF = (False, True)
LSTM_CASES = tuple(CellCase("lstm", *switches) for switches in product(_ON_OFF, _ON_OFF, _ON_OFF))
GRU_CASES = tuple(CellCase("gru", False, *switches) for switches in product(_ON_OFF, _ON_OFF))
FULL_CASES = LSTM_CASES + GRU_CASES
STRUCTURE_CASES = tuple(replace(case, recurrence=name) for name in ("block", "diagonal") for case in FULL_CASES)
ALL_CASES = FULL_CASES + STRUCTURE_CASES
# Everything off and everything on, of both kinds and all structures: what the long lengths are run with.
_FULL_CORNERS = (LSTM_CASES[0], LSTM_CASES[-1], GRU_CASES[0], GRU_CASES[-1])
CORNER_CASES = tuple(replace(case, recurrence=name) for name in ("full", "block", "diagonal") for case in _FULL_CORNERS)


def make_inputs(
    case: CellCase,
    dtype: torch.dtype,
    *,
    num_rows: int = 3,
    num_steps: int = 9,
    width_in: int = 5,
    width: int = 8,
    seed: int | None = None,
) -> Inputs:
    """Input, non-zero initial state and weights, all of them leaves that want gradients.

    Weights are spread about the values that a cell starts with. A norm that scales by one makes chaotic cells: there
    the gradients in float64 change by up to 10^6 times what their inputs do, so that no number format tells them right.
    """
    generator = torch.Generator().manual_seed(num_steps if seed is None else seed)
    num_gates = 4 if case.kind == "lstm" and not case.coupled_gates else 3
    heard = case.heard_units(width)
    spread = 0.3 if case.recurrence == "diagonal" else 0.8 * heard**-0.5

    def leaf(*shape: int, scale: float = 1.0, shift: float = 0.0, kept: bool = False) -> Tensor:
        values = torch.randn(*shape, generator=generator, dtype=torch.float64) * scale + shift
        wanted = torch.promote_types(dtype, torch.float32) if kept else dtype
        return values.to(wanted).requires_grad_()

    x_BTE = leaf(num_rows, num_steps, width_in)
    state = tuple(leaf(num_rows, width, kept=True) for _ in range(2 if case.kind == "lstm" else 1))
    parts: list[Any] = [
        leaf(num_gates * width, width_in, scale=width_in**-0.5),
        leaf(num_gates * width, heard, scale=spread),
        leaf(num_gates * width, scale=0.2),
    ]
    if case.kind == "gru":
        parts.append(leaf(width, scale=0.2))
    parts += [leaf(width, scale=0.06, shift=0.3), leaf(width, scale=0.2)] if case.layer_norm else [None, None]
    parts.append(leaf(width, scale=0.05, shift=0.1) if case.temporal_residual else None)
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
    inputs: Inputs,
    reset_BT: Tensor | None,
) -> dict[str, Tensor]:
    """Outputs, final state and the gradients of a random weighting of both by every input, by name."""
    x_BTE, state, weights = inputs
    y_BTD, last = getattr(kernels, case.kind)(x_BTE, state, reset_BT, weights, **case.arguments())
    generator = torch.Generator().manual_seed(1)
    weighted = [
        (part.double() * torch.randn(part.shape, generator=generator, dtype=torch.float64).to(part.device)).sum()
        for part in (y_BTD, *last)
    ]
    leaves = {"x": x_BTE, **{f"state{index}": part for index, part in enumerate(state)}}
    leaves |= {name: part for name, part in weights._asdict().items() if part is not None}
    gradients = torch.autograd.grad(torch.stack(weighted).sum(), list(leaves.values()))
    results = {"y": y_BTD, **{f"last{index}": part for index, part in enumerate(last)}}
    results |= {f"gradient of {name}": part for name, part in zip(leaves, gradients, strict=True)}
    return {name: part.detach() for name, part in results.items()}


def in_float64(inputs: Inputs) -> Inputs:
    """The same numbers as leaves in float64."""
    x_BTE, state, weights = inputs

    def leaf(part: Tensor) -> Tensor:
        return part.detach().double().requires_grad_()

    parts: list[Any] = [None if part is None else leaf(part) for part in weights]
    return leaf(x_BTE), tuple(leaf(part) for part in state), type(weights)(*parts)


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


def assert_accurate(
    value: dict[str, Tensor], case: CellCase, inputs: Inputs, reset_BT: Tensor | None, *, dtype: torch.dtype
) -> None:
    """Every tensor of an outcome in the format `dtype` within its bound of what the reference makes in float64."""
    expected = outcome(reference, case, in_float64(inputs), reset_BT)
    assert value.keys() == expected.keys()
    for name, part in value.items():
        assert relative_rms(part, expected[name]) <= ACCURACY[dtype], f"{name}: {relative_rms(part, expected[name])}"
