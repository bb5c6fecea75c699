"""The definition of correct, checked against torch's own layers and numerical differentiation."""

import pytest
import torch
from kernel_cases import ALL_CASES, CellCase, assert_close, make_inputs, make_resets, outcome
from torch import Tensor

from reprise.kernels import reference

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

    input_GE, recurrent_GD = _reordered(layer.weight_ih_l0, kind), _reordered(layer.weight_hh_l0, kind)
    bias_G, hidden_bias_G = _reordered(layer.bias_ih_l0, kind), _reordered(layer.bias_hh_l0, kind)
    if kind == "lstm":
        weights = reference.LstmWeights(input_GE, recurrent_GD, bias_G + hidden_bias_G)
        y_BTD, last = reference.lstm(x_BTE, state, None, weights, coupled_gates=False)
    else:
        # Only the candidate's recurrent bias stands apart: torch multiplies it by the reset gate.
        gate_bias = torch.cat((hidden_bias_G[:16], torch.zeros(8, dtype=torch.float64)))
        gru_weights = reference.GruWeights(input_GE, recurrent_GD, bias_G + gate_bias, hidden_bias_G[16:])
        y_BTD, last = reference.gru(x_BTE, state, None, gru_weights)

    torch.testing.assert_close(y_BTD, expected_BTD, rtol=1e-12, atol=1e-12)
    for part, expected in zip(last, expected_last, strict=True):
        torch.testing.assert_close(part, expected[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_gradients_equal_numerical_ones(case: CellCase) -> None:
    x_BTE, state, weights = make_inputs(case, torch.float64, num_rows=2, num_steps=3, width_in=2, width=3)
    reset_BT = make_resets(2, 3)
    present = [part for part in weights if part is not None]

    def run(x_BTE: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
        carried, given = parts[: len(state)], type(weights)(*parts[len(state) :])
        y_BTD, last = getattr(reference, case.kind)(x_BTE, carried, reset_BT, given, **case.arguments())
        return (y_BTD, *last)

    assert torch.autograd.gradcheck(run, (x_BTE, *state, *present), fast_mode=True)


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
