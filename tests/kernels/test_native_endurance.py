"""The native kernels from process to process and over ten thousand calls: the same bits, and no more memory; slow.

Every process here starts anew: it has imported nothing yet, and no memory that other tests freed takes in what leaks.

Legend: B rows, T time, D width, N tokens, V vocabulary.
"""

import gc
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from hashlib import sha256
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_cases import CORNER_CASES, CellCase, make_inputs, make_resets, outcome
from native_cases import (
    DTYPES,
    NORMED_GRU,
    NUM_ROWS,
    OPTIMIZED,
    REAL_CASES,
    SCANNED,
    WIDTH,
    ScanCall,
    loss_inputs,
    loss_outcome,
    random_resets,
)
from torch import Tensor

from reprise.kernels import cpu, cpu_loss, cpu_scan, native, window_memory
from reprise.kernels.loss import Penalties
from reprise.kernels.reference import LstmWeights

pytestmark = [pytest.mark.slow, pytest.mark.skipif(native.library() is None, reason="no C++ compiler here")]

NUM_CALLS = 10_000
Calls = list[Callable[[], dict[str, Tensor]]]


def _new_process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn"))


def _digests(num_threads: int) -> dict[str, str]:
    """SHA-256 of everything that cells, scans and the loss make forward and backward."""
    torch.set_num_threads(num_threads)
    results: dict[str, dict[str, Tensor]] = {}
    for dtype in DTYPES:
        for case in REAL_CASES:
            inputs = make_inputs(case, dtype, num_rows=NUM_ROWS, num_steps=24, width=WIDTH, width_in=WIDTH)
            results[f"{case} {dtype}"] = outcome(cpu, case, inputs, random_resets(NUM_ROWS, 24, share=0.1))
        for cell in SCANNED:
            results[f"{cell} {dtype}"] = ScanCall(cell, dtype, num_rows=NUM_ROWS, num_steps=24, width=WIDTH)()
        leaves, targets_N = loss_inputs(1000, 3000, WIDTH, dtype=dtype)
        results[f"loss {dtype}"] = loss_outcome(cpu_loss.linear_cross_entropy, leaves, targets_N)
    return {
        f"{name}: {part}": sha256(value.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, result in results.items()
        for part, value in result.items()
    }


@pytest.mark.parametrize("num_threads", [2, 5])
def test_two_processes_side_by_side_make_the_same_bits(num_threads: int) -> None:
    """With more threads than cores they wait for one another, and get there."""
    with _new_process() as one, _new_process() as other:
        futures = [process.submit(_digests, num_threads) for process in (one, other)]
        first, second = (future.result(timeout=300) for future in futures)
    assert first == second


def _native_results() -> list[Tensor]:
    """What only native code has a hand in: PyTorch's own products hang in a child forked from a parent with threads."""
    weights = make_inputs(OPTIMIZED, torch.float32, num_rows=1, num_steps=1, width=64)[2]
    assert isinstance(weights, LstmWeights)
    drive_BTG, state_BD = torch.linspace(-1.0, 1.0, 2 * 3 * 192).view(2, 3, 192), torch.full((2, 64), 0.5)
    scores_NV = torch.linspace(-1.0, 1.0, 60).view(4, 15)
    with torch.no_grad():
        y_BTD, *_ = torch.ops.reprise.recurrence(
            drive_BTG, state_BD, state_BD, None, *weights[1:3], None, *weights[3:], "coupled"
        )
        states_BTD = cpu_scan.linear_scan(y_BTD, y_BTD, state_BD, None)
        losses_N, _ = cpu_loss.chunk_loss(scores_NV, torch.zeros(15), torch.arange(4), Penalties(), True)
    return [y_BTD, states_BTD, losses_N, scores_NV]


def _fork_and_compare() -> bool:
    """Whether a forked child that believes in its parent's two threads makes what its parent made."""
    torch.set_num_threads(2)
    expected = [part.tolist() for part in _native_results()]
    reader, writer = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_send_results, args=(writer,))
    process.start()
    is_same = reader.poll(120) and reader.recv() == expected
    process.kill()
    process.join()
    return bool(is_same)


def _send_results(writer: Connection) -> None:
    writer.send([part.tolist() for part in _native_results()])


def test_a_forked_child_does_not_wait_for_its_parents_threads() -> None:
    with _new_process() as process:
        assert process.submit(_fork_and_compare).result(timeout=240), "the child hangs, or makes something else"


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("case", [OPTIMIZED, NORMED_GRU], ids=str)
def test_a_compiled_cell_makes_the_same_bits(case: CellCase, backend: str) -> None:
    inputs = make_inputs(case, torch.bfloat16, num_rows=NUM_ROWS, num_steps=8, width=WIDTH, width_in=WIDTH)
    reset_BT = random_resets(NUM_ROWS, 8, share=0.1)
    kernel = getattr(cpu, case.kind)
    compiled = SimpleNamespace(**{case.kind: torch.compile(kernel, backend=backend, fullgraph=True)})
    expected = outcome(cpu, case, inputs, reset_BT)
    for name, part in outcome(compiled, case, inputs, reset_BT).items():
        assert torch.equal(part, expected[name]), name


def _cell_calls() -> Calls:
    calls: Calls = []
    for index, case in enumerate(CORNER_CASES):
        for dtype in DTYPES:
            num_rows, num_steps = 2 + index % 3, 1 + index % 4
            inputs = make_inputs(case, dtype, num_rows=num_rows, num_steps=num_steps, width=32)
            calls.append(partial(outcome, cpu, case, inputs, make_resets(num_rows, num_steps)))
    return calls


def _scan_calls() -> Calls:
    shapes = ({"num_rows": 1, "num_steps": 5, "width": 40}, {"num_rows": 3, "num_steps": 2, "width": 19})
    return [ScanCall(cell, dtype, **shape) for cell in SCANNED for dtype in DTYPES for shape in shapes]


def _loss_calls() -> Calls:
    calls: Calls = []
    for shape in ((7, 31, 8), (20, 100, 16)):
        for dtype in DTYPES:
            inputs = loss_inputs(*shape, dtype=dtype)
            calls.append(partial(loss_outcome, cpu_loss.linear_cross_entropy, *inputs, chunk_tokens=16))
    return calls


def _resident_kib() -> int:
    gc.collect()
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0])


def _grown_kib(make_calls: Callable[[], Calls]) -> int:
    """KiB of memory more that are resident after NUM_CALLS calls than before them."""
    torch.set_num_threads(2)
    # Windows as small as these take the path of large ones, and their sizes take turns.
    window_memory._SMALLEST_BYTES = 1
    calls: Any = make_calls()

    def run(num_calls: int) -> None:
        for index in range(num_calls):
            calls[index % len(calls)]()

    run(NUM_CALLS // 10)
    before = _resident_kib()
    run(NUM_CALLS)
    return _resident_kib() - before


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no count of resident memory here")
@pytest.mark.parametrize("make_calls", [_cell_calls, _scan_calls, _loss_calls])
def test_memory_does_not_grow_over_ten_thousand_calls(make_calls: Callable[[], Calls]) -> None:
    with _new_process() as process:
        grown_kib = process.submit(_grown_kib, make_calls).result(timeout=300)
    # A leak of a quarter KiB a call would show.
    assert grown_kib < NUM_CALLS / 4
