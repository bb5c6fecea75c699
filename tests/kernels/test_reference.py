"""The definition of correct, checked against torch's own layers and numerical differentiation."""

from types import ModuleType

import pytest
import torch
from kernel_cases import (
    ALL_CASES,
    STRUCTURE_CASES,
    CellCase,
    Inputs,
    assert_close,
    in_float64,
    make_inputs,
    make_resets,
    outcome,
    relative_rms,
)
from torch import Tensor

from reprise.kernels import eager, library, reference
from reprise.runtime import UserError

# Our order of gates from torch's i, f, g, o.
_FROM_TORCH = {"lstm": (3, 1, 0, 2), "gru": (0, 1, 2)}


def _reordered(weight: Tensor, kind: str) -> Tensor:
    blocks = weight.detach().chunk(len(_FROM_TORCH[kind]))
    return torch.cat([blocks[index] for index in _FROM_TORCH[kind]])


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_equals_torch_layer(kind: str) -> None:
    torch.manual_seed(0)
    layer = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[kind](5, 8, batch_first=True, dtype=torch.float64)
    x_BTE = torch.randn(3, 7, 5, dtype=torch.float64)
    state = tuple(torch.randn(3, 8, dtype=torch.float64) for _ in range(2 if kind == "lstm" else 1))
    stacked = tuple(part[None] for part in state)
    expected_BTD, expected_last = layer(x_BTE, stacked if kind == "lstm" else stacked[0])
    expected_last = expected_last if kind == "lstm" else (expected_last,)

    input_GE, recurrent_GK = _reordered(layer.weight_ih_l0, kind), _reordered(layer.weight_hh_l0, kind)
    bias_G, hidden_bias_G = _reordered(layer.bias_ih_l0, kind), _reordered(layer.bias_hh_l0, kind)
    if kind == "lstm":
        weights = reference.LstmWeights(input_GE, recurrent_GK, bias_G + hidden_bias_G)
        y_BTD, last = reference.lstm(x_BTE, state, None, weights, coupled_gates=False)
    else:
        # Only the candidate's recurrent bias stands apart: torch multiplies it by the reset gate.
        gate_bias = torch.cat((hidden_bias_G[:16], torch.zeros(8, dtype=torch.float64)))
        gru_weights = reference.GruWeights(input_GE, recurrent_GK, bias_G + gate_bias, hidden_bias_G[16:])
        y_BTD, last = reference.gru(x_BTE, state, None, gru_weights)

    torch.testing.assert_close(y_BTD, expected_BTD, rtol=1e-12, atol=1e-12)
    for part, expected in zip(last, expected_last, strict=True):
        torch.testing.assert_close(part, expected[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_gradients_equal_numerical_ones(case: CellCase) -> None:
    x_BTE, state, weights = make_inputs(case, torch.float64, num_rows=2, num_steps=3, width_in=2, width=4)
    reset_BT = make_resets(2, 3)
    present = [part for part in weights if part is not None]

    def run(x_BTE: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
        carried, given = parts[: len(state)], type(weights)(*parts[len(state) :])
        y_BTD, last = getattr(reference, case.kind)(x_BTE, carried, reset_BT, given, **case.arguments())
        return (y_BTD, *last)

    assert torch.autograd.gradcheck(run, (x_BTE, *state, *present), fast_mode=True)


@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_steps_one_by_one_equal_a_window(case: CellCase) -> None:
    x_BTE, state, weights = make_inputs(case, torch.float64)
    reset_BT = make_resets(3, 9)
    kernel = getattr(reference, case.kind)
    y_BTD, last = kernel(x_BTE, state, reset_BT, weights, **case.arguments())
    for t in range(9):
        y_B1D, state = kernel(x_BTE[:, t : t + 1], state, reset_BT[:, t : t + 1], weights, **case.arguments())
        torch.testing.assert_close(y_B1D[:, 0], y_BTD[:, t], rtol=1e-12, atol=1e-12)
    for part, expected in zip(state, last, strict=True):
        torch.testing.assert_close(part, expected, rtol=1e-12, atol=1e-12)


def _columns_GK(recurrent_GK: Tensor, width: int) -> Tensor:
    """Which unit each entry of a recurrent weight multiplies: unit d hears the K units from the start of its head."""
    num_rows, heard = recurrent_GK.shape
    units_G1 = torch.arange(num_rows).unsqueeze(1) % width
    return units_G1 - units_G1 % heard + torch.arange(heard)


def _made_full(inputs: Inputs) -> Inputs:
    """The same cell with its recurrent weight written out as a dense matrix, zero where a unit hears nothing."""
    x_BTE, state, weights = inputs
    width = state[0].shape[1]
    recurrent_GK = weights.recurrent_GK.detach()
    dense_GD = recurrent_GK.new_zeros(recurrent_GK.shape[0], width)
    dense_GD.scatter_(1, _columns_GK(recurrent_GK, width), recurrent_GK)
    return x_BTE, state, weights._replace(recurrent_GK=dense_GD.requires_grad_())


@pytest.mark.parametrize("case", STRUCTURE_CASES, ids=str)
def test_a_structure_equals_the_dense_matrix_that_it_stands_for(case: CellCase) -> None:
    inputs, reset_BT = make_inputs(case, torch.float64), make_resets(3, 9)
    results = outcome(reference, case, inputs, reset_BT)
    expected = outcome(reference, case, _made_full(inputs), reset_BT)
    name = "gradient of recurrent_GK"
    columns_GK = _columns_GK(inputs[2].recurrent_GK, inputs[1][0].shape[1])
    expected[name] = expected[name].gather(1, columns_GK)
    assert_close(results, expected, torch.float64)


@pytest.mark.parametrize("implementation", [reference, eager, library], ids=["reference", "eager", "library"])
@pytest.mark.parametrize("heard", [0, 3, 16])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_refuses_heads_that_do_not_divide_the_width(kind: str, heard: int, implementation: ModuleType) -> None:
    case = CellCase(kind)
    x_BTE, state, weights = make_inputs(case, torch.float32)
    weights = weights._replace(recurrent_GK=torch.zeros(weights.recurrent_GK.shape[0], heard))
    with pytest.raises(UserError, match=rf"second dimension is {heard}; allowed: 8 \(full\).*1 \(diagonal\)"):
        getattr(implementation, kind)(x_BTE, state, None, weights, **case.arguments())


@pytest.mark.parametrize("implementation", [reference, eager], ids=["reference", "eager"])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_diagonal_recurrence_reads_the_state_unrounded(kind: str, implementation: ModuleType) -> None:
    """In bf16 only products of matrices are rounded; with no input there is none."""
    case = CellCase(kind, recurrence="diagonal")
    x_BTE, state, weights = make_inputs(case, torch.bfloat16, num_steps=1)
    inputs = (torch.zeros_like(x_BTE), state, weights)
    exact_BTE, exact_state, exact_weights = in_float64(inputs)
    _, last = getattr(implementation, kind)(*inputs[:2], None, weights, **case.arguments())
    _, expected = getattr(reference, kind)(exact_BTE, exact_state, None, exact_weights, **case.arguments())
    assert relative_rms(last[0].detach(), expected[0].detach()) < 1e-6


@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_reset_equals_a_fresh_start(case: CellCase) -> None:
    x_BTE, state, weights = make_inputs(case, torch.float64)
    kernel = getattr(reference, case.kind)
    reset_BT = torch.zeros(3, 9, dtype=torch.bool)
    reset_BT[:, 4] = True
    y_BTD, last = kernel(x_BTE, state, reset_BT, weights, **case.arguments())
    zeros = tuple(torch.zeros_like(part) for part in state)
    fresh_BTD, fresh_last = kernel(x_BTE[:, 4:], zeros, None, weights, **case.arguments())
    assert torch.equal(y_BTD[:, 4:], fresh_BTD)
    assert all(torch.equal(part, fresh) for part, fresh in zip(last, fresh_last, strict=True))


def test_autocast_changes_products_only() -> None:
    case = CellCase("lstm", True, True, True)
    inputs = make_inputs(case, torch.float32)
    expected = outcome(reference, case, inputs, make_resets(3, 9))
    with torch.autocast("cpu", torch.bfloat16):
        results = outcome(reference, case, inputs, make_resets(3, 9))
    assert results["y"].dtype == torch.bfloat16
    assert results["last0"].dtype == results["last1"].dtype == torch.float32
    results["y"] = results["y"].float()
    assert_close(results, expected, torch.bfloat16)
