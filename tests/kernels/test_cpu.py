"""The native LSTM and GRU against the reference in float64, on every instruction set that this machine has."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
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

from reprise.cells.config import CellConfig
from reprise.kernels import cpu, dispatch, native, reference
from reprise.runtime import UserError

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C++ compiler here")

DTYPES = (torch.float32, torch.bfloat16)
OPTIMIZED = CellCase("lstm", True, True, True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_every_cell_is_accurate(case: CellCase, dtype: torch.dtype) -> None:
    """Widths of no whole vector, and with 32 units a head the products that go head by head."""
    for num_rows, width in ((3, 20), (5, 64)):
        inputs = make_inputs(case, dtype, num_rows=num_rows, num_steps=17, width=width)
        reset_BT = make_resets(num_rows, 17)
        result = outcome(cpu, case, inputs, reset_BT)
        assert_accurate(result, case, inputs, reset_BT, dtype=dtype)


@pytest.mark.parametrize("num_steps", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CORNER_CASES, ids=str)
def test_every_length_is_accurate(case: CellCase, dtype: torch.dtype, num_steps: int) -> None:
    inputs, reset_BT = make_inputs(case, dtype, num_steps=num_steps, width=32), make_resets(3, num_steps)
    assert_accurate(outcome(cpu, case, inputs, reset_BT), case, inputs, reset_BT, dtype=dtype)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    case=st.sampled_from(ALL_CASES),
    num_rows=st.integers(2, 70),
    num_steps=st.integers(1, 12),
    heads_width=st.integers(4, 40),
    width_in=st.integers(1, 20),
)
def test_random_shapes_are_accurate(
    case: CellCase, num_rows: int, num_steps: int, heads_width: int, width_in: int
) -> None:
    inputs = make_inputs(
        case, torch.float32, num_rows=num_rows, num_steps=num_steps, width=2 * heads_width, width_in=width_in
    )
    reset_BT = make_resets(num_rows, num_steps)
    assert_close(outcome(cpu, case, inputs, reset_BT), outcome(reference, case, inputs, reset_BT), torch.float32)


@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_what_stands_before_a_reset_changes_no_bit_after_it(case: CellCase) -> None:
    x_BTE, state, weights = make_inputs(case, torch.float32)
    reset_BT = torch.zeros(3, 9, dtype=torch.bool)
    reset_BT[1, 5] = True
    changed_BTE = x_BTE.detach().clone()
    changed_BTE[1, :5] = float("nan")
    kernel = getattr(cpu, case.kind)
    y_BTD, last = kernel(x_BTE, state, reset_BT, weights, **case.arguments())
    other_BTD, other_last = kernel(changed_BTE, state, reset_BT, weights, **case.arguments())
    assert other_BTD[1, :5].isnan().all()
    assert torch.equal(y_BTD[1, 5:], other_BTD[1, 5:])
    assert torch.equal(y_BTD[0], other_BTD[0])
    assert all(torch.equal(part, other) for part, other in zip(last, other_last, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CORNER_CASES, ids=str)
def test_bits_depend_neither_on_the_run_nor_on_threads_or_other_rows(case: CellCase, dtype: torch.dtype) -> None:
    inputs, reset_BT = make_inputs(case, dtype, num_rows=19, num_steps=7, width=160), make_resets(19, 7)
    expected = outcome(cpu, case, inputs, reset_BT)
    threads = torch.get_num_threads()
    try:
        for num_threads in (threads, 1, 3):
            torch.set_num_threads(num_threads)
            again = outcome(cpu, case, inputs, reset_BT)
            # Weight gradients are the library's products over all steps, whose order of adding threads may change.
            names = again if num_threads == threads else ("y", "last0", "gradient of state0", "gradient of bias_G")
            assert all(torch.equal(again[name], expected[name]) for name in names)
    finally:
        torch.set_num_threads(threads)
    x_BTE, state, weights = inputs
    kernel = getattr(cpu, case.kind)
    few_BTD, _ = kernel(x_BTE[:4], tuple(part[:4] for part in state), reset_BT[:4], weights, **case.arguments())
    if dtype == torch.bfloat16:
        # The input's product is the library's: its bits may depend on the number of rows.
        assert relative_rms(few_BTD, expected["y"][:4]) < 1e-2
    else:
        assert relative_rms(few_BTD, expected["y"][:4]) < 1e-6


def test_autograd_finds_the_gradients_of_the_operator() -> None:
    drive_BTG = torch.randn(2, 3, 24, requires_grad=True)
    arguments = (
        drive_BTG,
        torch.randn(2, 8, requires_grad=True),
        torch.randn(2, 8, requires_grad=True),
        None,
        torch.randn(24, 8, requires_grad=True),
        torch.randn(24, requires_grad=True),
        None,
        torch.randn(8, requires_grad=True),
        torch.randn(8, requires_grad=True),
        torch.randn(8, requires_grad=True),
        "coupled",
    )
    utilities = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.reprise.recurrence.default, arguments, test_utils=utilities)


@pytest.mark.parametrize("case", [OPTIMIZED, CellCase("gru")], ids=str)
def test_torch_compile_takes_a_cell_whole(case: CellCase) -> None:
    x_BTE, state, weights = make_inputs(case, torch.float32, num_steps=2)
    kernel = partial(getattr(cpu, case.kind), **case.arguments())
    compiled = torch.compile(kernel, backend="aot_eager", fullgraph=True)
    results = []
    for function in (kernel, compiled):
        y_BTD, last = function(x_BTE, state, make_resets(3, 2), weights)
        total = y_BTD.sum() + last[0].square().sum()
        results.append((y_BTD, *last, *torch.autograd.grad(total, (x_BTE, weights.recurrent_GK))))
    assert all(torch.equal(part, other) for part, other in zip(*results, strict=True))


@pytest.mark.parametrize("kind", ["lstm", "gru", "mingru"])
def test_torch_compile_takes_a_layer_whole(kind: str) -> None:
    """With the choice of its kernel, before any other call has made it."""
    dispatch.pick.cache_clear()
    layer = CellConfig(kind=kind, coupled_gates=False, layer_norm=False, temporal_residual=False).build(8, 32)
    x_BTE, state = torch.randn(2, 3, 8), layer.initial_state(2)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)(x_BTE, state, None)
    expected = layer(x_BTE, state, None)
    assert torch.equal(compiled[0], expected[0]) and torch.equal(compiled[1][0], expected[1][0])


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_state_may_have_any_strides(kind: str) -> None:
    case = CellCase(kind)
    x_BTE, state, weights = make_inputs(case, torch.float32)
    strided = tuple(part.t().contiguous().t() for part in state)
    assert not strided[0].is_contiguous()
    kernel = partial(getattr(cpu, kind), **case.arguments())
    expected, result = (kernel(x_BTE, given, None, weights) for given in (state, strided))
    assert torch.equal(expected[0], result[0])
    assert all(torch.equal(part, other) for part, other in zip(expected[1], result[1], strict=True))


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_what_does_not_fit_is_refused_before_native_code_reads_it(kind: str) -> None:
    case = CellCase(kind)
    x_BTE, state, weights = make_inputs(case, torch.float32)
    kernel = partial(getattr(cpu, kind), **case.arguments())
    with pytest.raises(UserError, match="its second dimension is 3; allowed: 8"):
        kernel(x_BTE, state, None, weights._replace(recurrent_GK=weights.recurrent_GK[:, :3]))
    for other_state, reset_BT in ((tuple(part[:1] for part in state), None), (state, make_resets(3, 4))):
        with pytest.raises(AssertionError):
            kernel(x_BTE, other_state, reset_BT, weights)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_window_without_positions_leaves_the_state(kind: str) -> None:
    case = CellCase(kind)
    x_BTE, state, weights = make_inputs(case, torch.float32)
    y_BTD, last = getattr(cpu, kind)(x_BTE[:, :0], state, None, weights, **case.arguments())
    assert y_BTD.shape == (3, 0, 8)
    assert all(torch.equal(part, other) for part, other in zip(last, state, strict=True))


def test_autocast_runs_products_in_bf16_and_keeps_fp32_state() -> None:
    inputs = make_inputs(OPTIMIZED, torch.float32, width=32)
    with torch.autocast("cpu", torch.bfloat16):
        result = outcome(cpu, OPTIMIZED, inputs, None)
    assert result["y"].dtype == torch.bfloat16 and result["last0"].dtype == torch.float32
    expected = outcome(reference, OPTIMIZED, inputs, None)
    assert 1e-5 < relative_rms(result["last0"], expected["last0"]) < 2e-2


def test_a_carried_state_may_be_overwritten_before_backward() -> None:
    x_BTE, state, weights = make_inputs(OPTIMIZED, torch.float32)
    carried = tuple(part.detach().clone() for part in state)
    y_BTD, _ = cpu.lstm(x_BTE, carried, None, weights, coupled_gates=True)  # type: ignore[arg-type]
    for part in carried:
        part.zero_()
    gradient = torch.autograd.grad(y_BTD.sum(), weights.bias_G)[0]
    other_BTD, _ = cpu.lstm(x_BTE, state, None, weights, coupled_gates=True)  # type: ignore[arg-type]
    assert torch.equal(gradient, torch.autograd.grad(other_BTD.sum(), weights.bias_G)[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_other_formats_are_refused_by_name(dtype: torch.dtype) -> None:
    x_BTE, state, weights = make_inputs(OPTIMIZED, dtype)
    with pytest.raises(UserError, match=f"implementation=native.*{str(dtype).removeprefix('torch.')}"):
        cpu.lstm(x_BTE, state, None, weights, coupled_gates=True)  # type: ignore[arg-type]


_ELSEWHERE = """
import os, sys
import torch
from kernel_cases import ALL_CASES, assert_accurate, make_inputs, make_resets, outcome
from reprise.kernels import cpu, native
assert native.level() == os.environ["REPRISE_NATIVE"], native.level()
for dtype in (torch.float32, torch.bfloat16):
    for case in ALL_CASES:
        inputs, reset_BT = make_inputs(case, dtype, num_rows=35, num_steps=5, width=64), make_resets(35, 5)
        assert_accurate(outcome(cpu, case, inputs, reset_BT), case, inputs, reset_BT, dtype=dtype)
print("accurate")
"""


def _run(code: str, **environment: str) -> str:
    path = os.pathsep.join((str(Path(__file__).parent), *sys.path))
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("level", ["portable", "emulated_tiles", "avx2", "avx512"])
def test_every_instruction_set_is_accurate(level: str) -> None:
    """The build for any processor, AMX's memory layout in plain code, and what lies between, where it runs."""
    if level in ("avx2", "avx512") and level not in native._levels_here():
        pytest.skip(f"no {level} here")
    assert "accurate" in _run(_ELSEWHERE, REPRISE_NATIVE=level)


def test_without_a_compiler_one_line_says_so(tmp_path: Path) -> None:
    code = """
import torch
from reprise.kernels import dispatch, eager
assert dispatch.pick("lstm", "cpu", torch.float32, "auto", switches=("layer_norm",)) is eager.lstm
"""
    said = _run(code, PATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path), CXX="")
    assert said.count("no C++ compiler found") == 1


def test_a_build_that_fails_names_the_error(tmp_path: Path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho 'error: out of paper' >&2\nexit 1\n")
    compiler.chmod(0o755)
    code = "from reprise.kernels import native\nassert native.library() is None"
    said = _run(code, CXX=str(compiler), XDG_CACHE_HOME=str(tmp_path))
    assert "out of paper" in said and len(said.splitlines()) == 1


def test_an_unknown_instruction_set_is_refused() -> None:
    code = """
from reprise.kernels import native
from reprise.runtime import UserError
try:
    native.library()
except UserError as error:
    print(error)
"""
    assert "REPRISE_NATIVE=mmx: allowed: off, amx" in _run(code, REPRISE_NATIVE="mmx")
