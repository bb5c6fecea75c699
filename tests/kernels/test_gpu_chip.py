"""The GPU kernels on a GPU, where there is one.

Legend: B rows, T time, E input width, D width.
"""

import importlib.util

import interpreted
import pytest
import torch
from kernel_cases import (
    ALL_CASES,
    BOUNDS,
    CORNER_CASES,
    LENGTHS,
    CellCase,
    Inputs,
    assert_accurate,
    assert_close,
    make_inputs,
    make_resets,
    outcome,
    relative_rms,
)

from reprise.kernels import dispatch, gpu, gpu_graphs, reference_scan

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or importlib.util.find_spec("triton") is None, reason="no GPU, or no Triton"
)


def _on_gpu(case: CellCase, inputs: Inputs, reset_BT: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """An outcome of the kernels on a GPU, back on the CPU."""
    x_BTE, state, weights = inputs

    def moved(part: torch.Tensor) -> torch.Tensor:
        return part.detach().cuda().requires_grad_()

    placed = (
        moved(x_BTE),
        tuple(map(moved, state)),
        type(weights)(*(part if part is None else moved(part) for part in weights)),
    )
    results = outcome(gpu, case, placed, None if reset_BT is None else reset_BT.cuda())
    return {name: part.cpu() for name, part in results.items()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_on_a_gpu_every_cell_is_as_exact_as_its_format(case: CellCase, dtype: torch.dtype) -> None:
    inputs, reset_BT = make_inputs(case, dtype, num_rows=5, num_steps=17, width=200), make_resets(5, 17)
    assert_accurate(_on_gpu(case, inputs, reset_BT), case, inputs, reset_BT, dtype=dtype)


@pytest.mark.parametrize("num_steps", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CORNER_CASES, ids=str)
def test_on_a_gpu_every_length_launched_recorded_and_replayed(
    case: CellCase, dtype: torch.dtype, num_steps: int
) -> None:
    """The first window is launched, the second recorded, the third replayed; the last two runs agree to the bit."""
    gpu_graphs._recordings.clear()
    inputs = make_inputs(case, dtype, num_rows=5, num_steps=num_steps, width_in=16, width=128)
    reset_BT = make_resets(5, num_steps)
    results = [_on_gpu(case, inputs, reset_BT) for _ in range(4)]
    for result in results:
        assert_accurate(result, case, inputs, reset_BT, dtype=dtype)
    assert all(torch.equal(part, results[3][name]) for name, part in results[2].items())
    if case.recurrence != "diagonal" and num_steps >= 4:
        assert all(isinstance(known, gpu_graphs._Recording) for known in gpu_graphs._recordings.values())


@pytest.mark.parametrize("case", CORNER_CASES, ids=str)
def test_on_a_gpu_nothing_comes_through_a_reset(case: CellCase) -> None:
    x_BTE, state, weights = make_inputs(case, torch.float32, num_steps=9, width=64)
    reset_BT = torch.zeros(3, 9, dtype=torch.bool)
    reset_BT[1, 5] = True
    changed_BTE = x_BTE.detach().clone()
    changed_BTE[1, :5] = float("nan")
    results = [_on_gpu(case, (part.requires_grad_(), state, weights), reset_BT)["y"] for part in (x_BTE, changed_BTE)]
    assert torch.equal(results[0][1, 5:], results[1][1, 5:]) and torch.equal(results[0][0], results[1][0])


def test_on_a_gpu_inside_another_capture_and_without_growing() -> None:
    case = interpreted.ALL_ON
    x_BTE, state, weights = make_inputs(case, torch.bfloat16, num_steps=70, width=128)
    x_BTE, state = x_BTE.detach().cuda(), tuple(part.detach().cuda() for part in state)
    weights = type(weights)(*(None if part is None else part.detach().cuda() for part in weights))
    with torch.no_grad():
        expected_BTD, _ = gpu.lstm(x_BTE, state, None, weights, **case.arguments())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y_BTD, _ = gpu.lstm(x_BTE, state, None, weights, **case.arguments())
        graph.replay()
        torch.testing.assert_close(y_BTD, expected_BTD)
        for _ in range(4):
            gpu.lstm(x_BTE, state, None, weights, **case.arguments())
        before = torch.cuda.memory_allocated()
        for _ in range(100):
            gpu.lstm(x_BTE, state, None, weights, **case.arguments())
        assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("case", CORNER_CASES[:4], ids=str)
def test_on_a_gpu_layers_and_windows_that_share_a_recording_are_kept_apart(
    case: CellCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_graphs._recordings.clear()
    results = interpreted.two_steps_of_training(case, "cuda", num_steps=9)
    assert all(isinstance(known, gpu_graphs._Recording) for known in gpu_graphs._recordings.values())
    monkeypatch.setattr(gpu_graphs, "can_record", lambda device: False)
    expected = interpreted.two_steps_of_training(case, "cuda", num_steps=9)
    assert all(
        relative_rms(part, other) <= BOUNDS[torch.float32] for part, other in zip(results, expected, strict=True)
    )


def test_on_a_gpu_recordings_outlive_those_that_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for two layouts a third one comes and goes, with all that PyTorch frees with a graph."""
    monkeypatch.setattr(gpu_graphs, "_MOST_LAYOUTS", 2)
    gpu_graphs._recordings.clear()
    case = CORNER_CASES[0]
    windows = [make_inputs(case, torch.bfloat16, num_steps=num_steps, width=512) for num_steps in (8, 9, 10)]

    def run(index: int) -> torch.Tensor:
        x_BTE, state, weights = windows[index]
        parts = [None if part is None else part.detach().cuda() for part in weights]
        with torch.no_grad():
            placed = tuple(part.detach().cuda() for part in state)
            y_BTD, _ = gpu.lstm(x_BTE.detach().cuda(), placed, None, type(weights)(*parts), **case.arguments())
        return y_BTD.cpu()

    expected = [run(index) for index in range(3)]
    for index in (0, 0, 1, 1, 0, 2, 2, 0, 1, 1, 0, 0):
        torch.testing.assert_close(run(index), expected[index])
        # What has been freed goes back to the driver: whoever still reads it fails.
        torch.cuda.empty_cache()


def test_on_a_gpu_a_recording_serves_inference_and_what_follows_it() -> None:
    gpu_graphs._recordings.clear()
    x_BTE, state, weights = make_inputs(CORNER_CASES[0], torch.float32, num_steps=9)
    placed = [part.detach().cuda() for part in (x_BTE, *state)]
    parts = [None if part is None else part.detach().cuda() for part in weights]
    results = []
    for mode in (torch.inference_mode, torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            results.append(gpu.lstm(placed[0], tuple(placed[1:]), None, type(weights)(*parts), coupled_gates=False)[0])
    assert all(torch.equal(part, results[2]) for part in results[1:])


def test_on_a_gpu_two_streams_have_a_recording_each() -> None:
    gpu_graphs._recordings.clear()
    case = CORNER_CASES[1]
    inputs = make_inputs(case, torch.float32, num_steps=33, width=256)
    expected = _on_gpu(case, inputs, None)
    streams = [torch.cuda.Stream() for _ in range(2)]
    for _ in range(3):
        for stream in streams:
            with torch.cuda.stream(stream):
                result = _on_gpu(case, inputs, None)
            assert all(relative_rms(part, expected[name]) <= BOUNDS[torch.float32] for name, part in result.items())
    assert len({known.stream.stream_id for known in gpu_graphs._recordings.values() if known}) == 4


def test_on_a_gpu_a_recording_that_fails_leaves_the_stream_as_it_was() -> None:
    """Waiting for the GPU is what a recording cannot hold."""
    window = gpu_graphs.Window({}, {}, {}, {"y_TB": torch.zeros(8, 2, device="cuda")})
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            assert gpu_graphs._recorded(lambda window: torch.cuda.synchronize(), window) is False
            assert torch.cuda.current_stream() == stream
            assert torch.ones(3, device="cuda").sum().item() == 3


def test_on_a_gpu_auto_is_triton_for_our_own_cells() -> None:
    assert dispatch.pick("lstm", "cuda", torch.bfloat16, "auto", switches=("layer_norm",)) is gpu.lstm
    assert dispatch.pick("lstm", "cuda", torch.bfloat16, "auto") is dispatch.KERNELS["lstm"]["library"]


@pytest.mark.parametrize("num_steps", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu_scan_equals_reference(dtype: torch.dtype, num_steps: int) -> None:
    decay_BTD, value_BTD = torch.rand(3, num_steps, 300).to(dtype), torch.randn(3, num_steps, 300).to(dtype)
    initial_BD, reset_BT = torch.randn(3, 300), make_resets(3, num_steps)
    results = []
    for kernels, device in ((gpu, "cuda"), (reference_scan, "cpu")):
        leaves = [part.to(device).requires_grad_() for part in (decay_BTD, value_BTD, initial_BD)]
        states_BTD = kernels.linear_scan(*leaves, reset_BT.to(device))
        gradients = torch.autograd.grad(states_BTD.square().sum(), leaves)
        named = zip(("states", "decay", "value", "initial"), (states_BTD.detach(), *gradients), strict=True)
        results.append({name: part.cpu() for name, part in named})
    assert_close(*results, dtype)
