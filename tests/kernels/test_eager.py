"""The hand-derived backward and the library's layers against the reference, in every format that they claim."""

from types import ModuleType

import pytest
import torch
from kernel_cases import (
    ALL_CASES,
    CORNER_CASES,
    LENGTHS,
    CellCase,
    assert_accurate,
    assert_close,
    make_inputs,
    make_resets,
    outcome,
    relative_rms,
)

from reprise.kernels import eager, library, reference
from reprise.runtime import UserError

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
TEXTBOOK_CASES = [case for case in ALL_CASES if case.is_textbook]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_every_cell_equals_reference(case: CellCase, dtype: torch.dtype) -> None:
    inputs, reset_BT = make_inputs(case, dtype, num_steps=17), make_resets(3, 17)
    assert_close(outcome(eager, case, inputs, reset_BT), outcome(reference, case, inputs, reset_BT), dtype)


@pytest.mark.parametrize("num_steps", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CORNER_CASES, ids=str)
def test_every_length_is_as_exact_as_its_format(case: CellCase, dtype: torch.dtype, num_steps: int) -> None:
    inputs = make_inputs(case, dtype, num_rows=5, num_steps=num_steps, width_in=16, width=32)
    reset_BT = make_resets(5, num_steps)
    assert_accurate(outcome(eager, case, inputs, reset_BT), case, inputs, reset_BT, dtype=dtype)


@pytest.mark.parametrize("case", CORNER_CASES, ids=str)
def test_no_resets_and_more_than_one_chunk_of_slopes(case: CellCase) -> None:
    # 64 rows of 256 units make chunks of 8 steps: 20 steps are two whole chunks and a part of one.
    inputs = make_inputs(case, torch.float32, num_rows=64, num_steps=20, width_in=16, width=256)
    assert_close(outcome(eager, case, inputs, None), outcome(reference, case, inputs, None), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CORNER_CASES, ids=str)
def test_a_batch_of_no_rows_has_no_outputs_and_gradients_of_zero(case: CellCase, dtype: torch.dtype) -> None:
    inputs, reset_BT = make_inputs(case, dtype, num_rows=0), torch.zeros(0, 9, dtype=torch.bool)
    results, expected = outcome(eager, case, inputs, reset_BT), outcome(reference, case, inputs, reset_BT)
    assert results.keys() == expected.keys()
    for name, part in results.items():
        assert torch.equal(part, expected[name]), name
        assert part.dtype == expected[name].dtype and not part.any(), name


@pytest.mark.parametrize("num_steps", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", TEXTBOOK_CASES, ids=str)
def test_library_equals_reference(case: CellCase, dtype: torch.dtype, num_steps: int) -> None:
    inputs, reset_BT = make_inputs(case, dtype, num_steps=num_steps), make_resets(3, num_steps)
    assert_close(outcome(library, case, inputs, reset_BT), outcome(reference, case, inputs, reset_BT), dtype)


@pytest.mark.parametrize("recurrence", ["block", "diagonal"])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_library_refuses_a_recurrence_that_is_not_full(kind: str, recurrence: str) -> None:
    case = CellCase(kind, recurrence=recurrence)
    x_BTE, state, weights = make_inputs(case, torch.float32)
    with pytest.raises(UserError, match=f"no {recurrence} recurrence; allowed: auto, native, triton, eager, reference"):
        getattr(library, kind)(x_BTE, state, None, weights, **case.arguments())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kernels", [eager, library], ids=["eager", "library"])
@pytest.mark.parametrize("case", TEXTBOOK_CASES, ids=str)
def test_autocast_runs_products_in_its_format(case: CellCase, kernels: ModuleType, dtype: torch.dtype) -> None:
    inputs, reset_BT = make_inputs(case, torch.float32), make_resets(3, 9)
    expected = outcome(reference, case, inputs, reset_BT)
    with torch.autocast("cpu", dtype):
        results = outcome(kernels, case, inputs, reset_BT)
    assert results["y"].dtype == dtype
    assert results["last0"].dtype == torch.float32
    assert relative_rms(results["last0"], expected["last0"]) > 1e-5, "the products ran in fp32"
    results["y"] = results["y"].float()
    assert_close(results, expected, dtype)


def test_eager_keeps_a_cell_that_bf16_would_round_away() -> None:
    """A forget gate of 0.999 rounds to 1 in bf16; in fp32 the cell decays as it should."""
    width = 4
    bias_G = torch.tensor([0.0, 6.906755, -30.0, 0.0]).repeat_interleave(width)
    weights = reference.LstmWeights(torch.zeros(4 * width, width), torch.zeros(4 * width, width), bias_G)
    state = (torch.zeros(1, width), torch.ones(1, width))
    with torch.autocast("cpu", torch.bfloat16):
        _, (_, cell_BD) = eager.lstm(torch.zeros(1, 100, width), state, None, weights, coupled_gates=False)
    torch.testing.assert_close(cell_BD, torch.full((1, width), 0.999**100), rtol=1e-3, atol=0.0)


@pytest.mark.parametrize(
    ("kernels", "case"),
    [(eager, case) for case in ALL_CASES] + [(library, case) for case in TEXTBOOK_CASES],
    ids=lambda value: value.__name__.split(".")[-1] if isinstance(value, ModuleType) else str(value),
)
def test_what_stands_before_a_reset_changes_no_bit_after_it(kernels: ModuleType, case: CellCase) -> None:
    x_BTE, state, weights = make_inputs(case, torch.float32)
    reset_BT = torch.zeros(3, 9, dtype=torch.bool)
    reset_BT[1, 5] = True
    changed_BTE = x_BTE.detach().clone()
    changed_BTE[1, :5] = 1e4
    kernel = getattr(kernels, case.kind)
    y_BTD, last = kernel(x_BTE, state, reset_BT, weights, **case.arguments())
    other_BTD, other_last = kernel(changed_BTE, state, reset_BT, weights, **case.arguments())
    assert not torch.equal(y_BTD[1, :5], other_BTD[1, :5])
    assert torch.equal(y_BTD[1, 5:], other_BTD[1, 5:])
    assert torch.equal(y_BTD[0], other_BTD[0])
    assert all(torch.equal(part, other) for part, other in zip(last, other_last, strict=True))


def test_backward_can_be_taken_twice() -> None:
    case = CellCase("lstm", True, True, True)
    x_BTE, state, weights = make_inputs(case, torch.float32)
    assert isinstance(weights, reference.LstmWeights)
    y_BTD, _ = eager.lstm(x_BTE, state, None, weights, **case.arguments())
    first = torch.autograd.grad(y_BTD.sum(), weights.input_GE, retain_graph=True)[0]
    second = torch.autograd.grad(y_BTD.sum(), weights.input_GE)[0]
    assert torch.equal(first, second)
