"""The GPU kernels in Triton's interpreter and through its compiler, neither of which needs a GPU.

Legend: B rows, T time, E input width, D width.
"""

import importlib.util
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import interpreted
import numpy
import pytest
import torch
from kernel_cases import (
    ALL_CASES,
    CORNER_CASES,
    CellCase,
    make_inputs,
    make_resets,
    outcome,
)

from reprise.kernels import dispatch, eager, gpu, gpu_launch, gpu_window
from reprise.runtime import UserError

HAS_TRITON = importlib.util.find_spec("triton") is not None
needs_compiler = pytest.mark.skipif(
    not HAS_TRITON or os.environ.get("TRITON_INTERPRET") == "1", reason="Triton is not installed, or interprets"
)

Interpreter = Callable[..., Any]


def _interpreter_is_too_old() -> bool:
    """Before 3.7 the interpreter counts loops with a conversion that numpy refuses since 2.4."""
    import importlib.metadata

    version = tuple(map(int, importlib.metadata.version("triton").split(".")[:2]))
    return version < (3, 7) and tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 4)


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    """Runs a function of `interpreted` in a process where Triton interprets."""
    if not HAS_TRITON:
        pytest.skip("Triton is not installed")
    if _interpreter_is_too_old():
        pytest.skip("the interpreter of this Triton does not run with this numpy")
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        spawn = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(max_workers=1, mp_context=spawn, initializer=interpreted.round_as_a_gpu_does)
        # A process starts with the first task, and keeps the environment that it starts in.
        pool.submit(interpreted.scan_cells_equal_the_reference).result()
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before
    with pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()


@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_every_cell_is_as_exact_as_fp32(interpreter: Interpreter, case: CellCase) -> None:
    interpreter(interpreted.is_accurate, case, torch.float32, 2, 6, True)


@pytest.mark.parametrize("case", CORNER_CASES, ids=str)
@pytest.mark.parametrize(("num_steps", "with_resets"), [(1, False), (5, True)])
def test_every_length_is_as_exact_as_bf16(
    interpreter: Interpreter, case: CellCase, num_steps: int, with_resets: bool
) -> None:
    interpreter(interpreted.is_accurate, case, torch.bfloat16, num_steps, 16, with_resets)


@pytest.mark.parametrize("case", CORNER_CASES, ids=str)
def test_fp64_equals_reference_to_its_last_digits(interpreter: Interpreter, case: CellCase) -> None:
    interpreter(interpreted.equals_reference, case, torch.float64, 2, 6)


@pytest.mark.parametrize("case", [CORNER_CASES[0], CORNER_CASES[6], CORNER_CASES[9]], ids=str)
def test_wider_than_one_block_of_units(interpreter: Interpreter, case: CellCase) -> None:
    interpreter(interpreted.is_accurate, case, torch.float32, 2, 300, True)


def test_fp16_and_autocast(interpreter: Interpreter) -> None:
    interpreter(interpreted.equals_reference, interpreted.ALL_ON, torch.float16, 3, 6)
    interpreter(interpreted.runs_products_in_the_format_of_autocast, interpreted.ALL_ON)


@pytest.mark.parametrize("case", [CORNER_CASES[1], CORNER_CASES[7], CORNER_CASES[8], CORNER_CASES[10]], ids=str)
def test_nothing_comes_through_a_reset(interpreter: Interpreter, case: CellCase) -> None:
    interpreter(interpreted.lets_nothing_through_a_reset, case)


def test_backward_twice_and_forward_alone(interpreter: Interpreter) -> None:
    interpreter(interpreted.takes_backward_twice_and_keeps_nothing_without_it, interpreted.ALL_ON)


@pytest.mark.parametrize("case", [*CORNER_CASES[:4], CellCase("lstm", coupled_gates=True), CORNER_CASES[9]], ids=str)
def test_a_carried_state_may_be_overwritten_before_backward(interpreter: Interpreter, case: CellCase) -> None:
    interpreter(interpreted.lets_a_carried_state_be_overwritten_before_backward, case)


def test_a_state_of_a_scan_may_be_overwritten_before_backward(interpreter: Interpreter) -> None:
    interpreter(interpreted.lets_a_state_of_a_scan_be_overwritten_before_backward)


@pytest.mark.parametrize("case", [CORNER_CASES[1], CORNER_CASES[11]], ids=str)
def test_is_an_operator_of_pytorch(interpreter: Interpreter, case: CellCase) -> None:
    interpreter(interpreted.is_an_operator_of_pytorch, case)


@pytest.mark.parametrize("case", [CORNER_CASES[1], CORNER_CASES[3]], ids=str)
def test_is_compiled_whole(interpreter: Interpreter, case: CellCase) -> None:
    interpreter(interpreted.is_compiled_whole, case)


@pytest.mark.parametrize("case", [CORNER_CASES[1], CORNER_CASES[7]], ids=str)
def test_a_recorded_window_equals_a_launched_one(interpreter: Interpreter, case: CellCase) -> None:
    interpreter(interpreted.replays_what_it_recorded, case)


def test_layers_and_windows_that_share_a_recording_are_kept_apart(interpreter: Interpreter) -> None:
    interpreter(interpreted.keeps_apart_what_shares_a_recording, interpreted.ALL_ON)


def test_a_recording_serves_inference_training_and_threads(interpreter: Interpreter) -> None:
    interpreter(interpreted.serves_inference_and_what_follows_it, interpreted.ALL_ON)
    interpreter(interpreted.records_anew_what_it_forgot, interpreted.ALL_ON)
    interpreter(interpreted.serves_two_threads, interpreted.ALL_ON)


@pytest.mark.parametrize("case", [CORNER_CASES[1], CORNER_CASES[3], CORNER_CASES[6], CORNER_CASES[8]], ids=str)
def test_an_empty_batch_and_tensors_that_lie_otherwise(interpreter: Interpreter, case: CellCase) -> None:
    interpreter(interpreted.takes_an_empty_batch, case)
    interpreter(interpreted.takes_tensors_that_lie_otherwise, case)


def test_a_recording_that_fails_is_said_once(interpreter: Interpreter) -> None:
    (line,) = interpreter(interpreted.launches_where_recording_fails, interpreted.ALL_ON)
    assert "no CUDA graph (operation not permitted when stream is capturing)" in line and "one by one" in line


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_steps", "width"), [(1, 8), (9, 300)])
def test_scan_equals_reference(interpreter: Interpreter, dtype: torch.dtype, num_steps: int, width: int) -> None:
    interpreter(interpreted.scans_as_the_reference, dtype, num_steps, width)


class Compiler:
    """In the place of a kernel: compiles it for what it is launched with, for one kind of GPU, and launches nothing."""

    def __init__(self, kernel: Any, capability: int) -> None:
        self._kernel, self._capability = kernel, capability
        self.compiled: dict[str, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> "Compiler":
        return self

    def __call__(self, *, num_warps: int, **arguments: Any) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        formats = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
        signature, constants, attributes = {}, {}, {}
        for index, name in enumerate(self._kernel.arg_names):
            value = arguments[name]
            if isinstance(value, torch.Tensor):
                signature[name] = f"*{formats.get(value.dtype, 'u8')}"
                attributes[index,] = [["tt.divisibility", 16]]
            elif name == "start" or (name.islower() and value not in (None, 1)):
                signature[name] = "i32"
            else:
                signature[name], constants[name] = "constexpr", value
        key = f"{signature} {constants} {num_warps}"
        if key not in self.compiled:
            source = ASTSource(self._kernel, signature=signature, constexprs=constants, attrs=attributes)
            target = GPUTarget("cuda", self._capability, 32)
            self.compiled[key] = triton.compile(source, target=target, options={"num_warps": num_warps})


def _compile(monkeypatch: pytest.MonkeyPatch, folder: Path, capability: int) -> list[Compiler]:
    """Put compilers in the place of all kernels."""
    from reprise.kernels.tritonsrc import gru, lstm, scan

    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    names = [(lstm, "lstm_forward"), (lstm, "lstm_backward"), (gru, "gru_forward"), (gru, "gru_backward")]
    names += [(scan, "scan_forward"), (scan, "scan_backward")]
    compilers = {name: Compiler(getattr(module, name), capability) for module, name in names}
    for module, name in names:
        monkeypatch.setattr(module, name, compilers[name])
    monkeypatch.setattr(gpu_window, "_kernel", compilers.__getitem__)
    return list(compilers.values())


def _check(compilers: list[Compiler], num_expected: int) -> None:
    """As many compiled as expected, and none wants more shared memory than every GPU has."""
    compiled = [result for compiler in compilers for result in compiler.compiled.values()]
    assert len(compiled) == num_expected
    assert all(len(result.asm["cubin"]) > 0 and result.metadata.shared <= 64 << 10 for result in compiled)


@needs_compiler
@pytest.mark.parametrize(
    "case", [CORNER_CASES[1], CORNER_CASES[3], CORNER_CASES[8], CORNER_CASES[9], CORNER_CASES[11]], ids=str
)
def test_what_is_launched_compiles_for_a_gpu(case: CellCase, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compilers = _compile(monkeypatch, tmp_path, 90)
    outcome(gpu, case, make_inputs(case, torch.bfloat16, num_steps=2, width=1000), make_resets(3, 2))
    _check(compilers, 2)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("case", "dtype", "width"),
    [
        *(
            (case, dtype, width)
            for case in CORNER_CASES
            for dtype, width in ((torch.float16, 6), (torch.float64, 1024))
        ),
        # The widest norm; the matrices of the other recurrences would be large.
        *((case, torch.float32, 8192) for case in (CORNER_CASES[9], CORNER_CASES[11])),
    ],
    ids=str,
)
def test_every_format_and_width_compiles(
    case: CellCase,
    dtype: torch.dtype,
    width: int,
    capability: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    compilers = _compile(monkeypatch, tmp_path, capability)
    for num_rows, reset_BT in ((1, None), (3, make_resets(3, 3))):
        inputs = make_inputs(case, dtype, num_rows=num_rows, num_steps=3, width_in=2, width=width)
        outcome(gpu, case, inputs, reset_BT)
    _check(compilers, 4)


@needs_compiler
def test_the_scan_compiles_for_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compilers = _compile(monkeypatch, tmp_path, 90)
    for dtype in (torch.bfloat16, torch.float32):
        part_BTD = torch.zeros(2, 3, 1000, dtype=dtype).requires_grad_()
        gpu.linear_scan(part_BTD, part_BTD, torch.zeros(2, 1000), make_resets(2, 3)).sum().backward()
    _check(compilers, 4)


def test_a_cpu_has_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    gpu_launch.obstacle.cache_clear()
    with pytest.raises(UserError, match="implementation=triton: Triton .*; allowed: auto, .*library, eager, reference"):
        dispatch.pick("lstm", "cpu", torch.float32, "triton")


@needs_compiler
def test_a_c_compiler_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton takes what CC names, whatever else there is."""
    monkeypatch.setenv("CC", "/no/such/compiler")
    gpu_launch.obstacle.cache_clear()
    try:
        assert gpu_launch.obstacle("cuda") == "Triton needs a C compiler (gcc or clang, or CC)"
    finally:
        gpu_launch.obstacle.cache_clear()


def test_without_triton_a_gpu_runs_eager_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_launch, "find_spec", lambda name: None)
    for function in (gpu_launch.obstacle, dispatch.pick):
        function.cache_clear()
    try:
        picked = dispatch.pick("gru", "cuda", torch.bfloat16, "auto", switches=("layer_norm",))
        assert picked is eager.gru
        assert "eager (auto: Triton is not installed (pip install triton)) on cuda" in capsys.readouterr().out
        with pytest.raises(UserError, match="implementation=triton: Triton is not installed"):
            dispatch.pick("gru", "cuda", torch.bfloat16, "triton")
    finally:
        for function in (gpu_launch.obstacle, dispatch.pick):
            function.cache_clear()


def test_a_norm_that_no_program_can_hold_is_refused() -> None:
    inputs = make_inputs(CORNER_CASES[9], torch.float32, num_steps=1, width=8200)
    with pytest.raises(UserError, match=r"model.width=8200 .*implementation=eager"):
        outcome(gpu, CORNER_CASES[9], inputs, None)
