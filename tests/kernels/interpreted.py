"""Checks of the Triton kernels that run where Triton interprets them: in a process of its own, on the CPU.

Triton decides when it is imported whether it compiles or interprets, for a whole process. So every check here is a
function that a test sends to such a process; a failed assertion comes back as the test's own.

Legend: B rows, T time, D width.
"""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy
import torch
from kernel_cases import (
    CellCase,
    assert_accurate,
    assert_close,
    make_inputs,
    make_resets,
    outcome,
    relative_rms,
)
from torch import Tensor

from reprise.kernels import gpu, gpu_graphs, reference, reference_scan
from reprise.kernels.gpu_layout import CellInputs
from reprise.kernels.reference_scan import MinimalWeights, RgLruWeights

ALL_ON = CellCase("lstm", True, True, True)
# Cells on a linear scan, and their gates.
SCAN_CELLS = {"mingru": 2, "minlstm": 3, "rglru": 3}


def round_as_a_gpu_does() -> None:
    """Triton's interpreter cuts fp32 off to bf16, a GPU rounds to the nearest: twice as exact. Done once a process."""
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(values: Any, given: Any, wanted: Any, mode: Any) -> Any:
        if (given.name, wanted.name) != ("fp32", "bf16"):
            return convert(values, given, wanted, mode)
        bits = torch.from_numpy(numpy.ascontiguousarray(values)).bfloat16().view(torch.int16)
        return bits.numpy().view(numpy.uint16).reshape(values.shape)

    interpreter._convert_float = rounded


def is_accurate(case: CellCase, dtype: torch.dtype, num_steps: int, width: int, with_resets: bool) -> None:
    """Outputs, last state and all gradients within the bound of the reference in float64."""
    inputs = make_inputs(case, dtype, num_rows=2, num_steps=num_steps, width=width)
    reset_BT = make_resets(2, num_steps) if with_resets else None
    assert_accurate(outcome(gpu, case, inputs, reset_BT), case, inputs, reset_BT, dtype=dtype)


def equals_reference(case: CellCase, dtype: torch.dtype, num_steps: int, width: int) -> None:
    """The same against the reference in the same format, and the formats of all results."""
    inputs = make_inputs(case, dtype, num_rows=2, num_steps=num_steps, width=width)
    reset_BT = make_resets(2, num_steps)
    assert_close(outcome(gpu, case, inputs, reset_BT), outcome(reference, case, inputs, reset_BT), dtype)


def runs_products_in_the_format_of_autocast(case: CellCase) -> None:
    inputs, reset_BT = make_inputs(case, torch.float32, num_rows=2, num_steps=3), make_resets(2, 3)
    expected = outcome(reference, case, inputs, reset_BT)
    with torch.autocast("cpu", torch.bfloat16):
        results = outcome(gpu, case, inputs, reset_BT)
    assert results["y"].dtype == torch.bfloat16 and results["last0"].dtype == torch.float32
    assert relative_rms(results["last0"], expected["last0"]) > 1e-5, "the products ran in fp32"
    results["y"] = results["y"].float()
    assert_close(results, expected, torch.bfloat16)


def lets_nothing_through_a_reset(case: CellCase) -> None:
    """What stands before a reset, NaN even, changes no bit after it, nor any gradient."""
    x_BTE, state, weights = make_inputs(case, torch.float32, num_rows=2, num_steps=4)
    reset_BT = torch.zeros(2, 4, dtype=torch.bool)
    reset_BT[1, 2] = True
    changed_BTE = x_BTE.detach().clone()
    changed_BTE[1, :2] = math.nan
    changed_BTE.requires_grad_()
    y_BTD, last = getattr(gpu, case.kind)(x_BTE, state, reset_BT, weights, **case.arguments())
    other_BTD, other_last = getattr(gpu, case.kind)(changed_BTE, state, reset_BT, weights, **case.arguments())
    assert other_BTD[1, :2].isnan().all()
    assert torch.equal(y_BTD[1, 2:], other_BTD[1, 2:]) and torch.equal(y_BTD[0], other_BTD[0])
    assert all(torch.equal(part, other) for part, other in zip(last, other_last, strict=True))
    gradients = (
        torch.autograd.grad(out_BTD[1, 2:].sum(), leaf_BTE)[0]
        for out_BTD, leaf_BTE in ((y_BTD, x_BTE), (other_BTD, changed_BTE))
    )
    grad_BTE, other_grad_BTE = gradients
    assert torch.equal(grad_BTE[1, 2:], other_grad_BTE[1, 2:]) and not grad_BTE[1, :2].any()


def takes_backward_twice_and_keeps_nothing_without_it(case: CellCase) -> None:
    x_BTE, state, weights = make_inputs(case, torch.float32, num_rows=2, num_steps=3)
    y_BTD, _ = getattr(gpu, case.kind)(x_BTE, state, None, weights, **case.arguments())
    first = torch.autograd.grad(y_BTD.sum(), weights.input_GE, retain_graph=True)[0]
    second = torch.autograd.grad(y_BTD.sum(), weights.input_GE)[0]
    assert torch.equal(first, second)
    with torch.no_grad():
        alone_BTD, last = getattr(gpu, case.kind)(x_BTE, state, None, weights, **case.arguments())
    assert torch.equal(alone_BTD, y_BTD) and not last[0].requires_grad


def lets_a_carried_state_be_overwritten_before_backward(case: CellCase) -> None:
    """Whoever carries the state writes the next window's over it: the gradients of this one stay what they are."""
    x_BTE, state, weights = make_inputs(case, torch.float32, num_rows=2, num_steps=3)
    kernel = partial(getattr(gpu, case.kind), **case.arguments())
    _is_the_same_once_overwritten(kernel, x_BTE, state, weights)


def lets_a_state_of_a_scan_be_overwritten_before_backward() -> None:
    for name in SCAN_CELLS:
        _is_the_same_once_overwritten(getattr(gpu, name), *_scan_inputs(name))


def _is_the_same_once_overwritten(kernel: Any, x_BTE: Tensor, state: tuple[Tensor, ...], weights: Any) -> None:
    leaves = [x_BTE, *(part for part in weights if part is not None)]
    for reset_BT in (None, make_resets(*x_BTE.shape[:2])):
        results = []
        for new_value in (None, math.nan):
            carried = tuple(part.detach().clone().requires_grad_() for part in state)
            y_BTD, last = kernel(x_BTE, carried, reset_BT, weights)
            with torch.no_grad():
                for part in carried if new_value is not None else ():
                    part.fill_(new_value)
            total = torch.stack([part.sum() for part in (y_BTD, *last)]).sum()
            results.append(torch.autograd.grad(total, (*leaves, *carried)))
        assert all(torch.equal(part, other) for part, other in zip(*results, strict=True))


def is_an_operator_of_pytorch(case: CellCase) -> None:
    """PyTorch's own checks of an operator: schema, fake results, autograd, and what torch.compile traces."""
    x_BTE, state, weights = make_inputs(case, torch.float32, num_rows=2, num_steps=2)
    kind = "coupled_lstm" if case.coupled_gates else case.kind
    parts = {"candidate_bias_D": None} | weights._asdict()
    inputs = CellInputs(x_BTE=x_BTE, reset_BT=make_resets(2, 2), kind=kind, product=torch.bfloat16, **parts)
    hidden_BD, cell_BD = (*state, None)[:2]
    torch.library.opcheck(torch.ops.reprise.triton_cell.default, (hidden_BD, cell_BD, *inputs, True))
    decay_BTD = torch.rand(2, 2, 8, dtype=torch.bfloat16).requires_grad_()
    torch.library.opcheck(
        torch.ops.reprise.triton_linear_scan.default, (decay_BTD, decay_BTD, state[0], make_resets(2, 2))
    )


def is_compiled_whole(case: CellCase) -> None:
    """torch.compile takes a cell without breaking the graph, and computes the same."""
    x_BTE, state, weights = make_inputs(case, torch.float32, num_rows=2, num_steps=2)
    kernel = partial(getattr(gpu, case.kind), **case.arguments())
    compiled = torch.compile(kernel, backend="aot_eager", fullgraph=True)
    results = []
    for function in (kernel, compiled):
        y_BTD, last = function(x_BTE, state, make_resets(2, 2), weights)
        total = y_BTD.sum() + last[0].square().sum()
        results.append((y_BTD, *last, *torch.autograd.grad(total, (x_BTE, weights.recurrent_GK))))
    assert all(torch.equal(part, other) for part, other in zip(*results, strict=True))


@contextmanager
def recording(record: Any, *, piece_steps: int, fewest_steps: int = 1, most_layouts: int = 16) -> Iterator[list[str]]:
    """Windows go through stages, as on a GPU, with `record` in place of CUDA's. Gives the lines that are said."""
    said: list[str] = []
    replaced = {
        "can_record": lambda device: True,
        "record": record,
        "say": said.append,
        "_stream": lambda device: 0,
        "_unused_stream": lambda device: None,
        "_wait": lambda device: None,
        "_PIECE_STEPS": piece_steps,
        "_FEWEST_STEPS": fewest_steps,
        "_MOST_LAYOUTS": most_layouts,
    }
    before = {name: getattr(gpu_graphs, name) for name in replaced}
    for name, value in replaced.items():
        setattr(gpu_graphs, name, value)
    try:
        yield said
    finally:
        gpu_graphs._recordings.clear()
        for name, value in before.items():
            setattr(gpu_graphs, name, value)


def replay(steps: gpu_graphs.Steps, stage: gpu_graphs.Window, stream: Any) -> Any:
    """In the place of a recording: the launches, on the stage."""
    return partial(steps, stage)


def replays_what_it_recorded(case: CellCase) -> None:
    """A window in two pieces of two lengths, through stages: the same bits as launched directly, for new inputs too."""
    recorded = []

    def record(steps: gpu_graphs.Steps, stage: gpu_graphs.Window, stream: Any) -> Any:
        recorded.append(stage.num_steps)
        return replay(steps, stage, stream)

    x_BTE, state, weights = make_inputs(case, torch.float32, num_rows=2, num_steps=3)
    windows = [((x_BTE.detach() * scale).requires_grad_(), state, weights) for scale in (1.0, 1.0, 2.0)]
    expected = [outcome(gpu, case, inputs, make_resets(2, 3)) for inputs in windows]
    with recording(record, piece_steps=2):
        for inputs, launched in zip(windows, expected, strict=True):
            _is_equal(outcome(gpu, case, inputs, make_resets(2, 3)), launched)
    assert recorded == [1, 2, 2, 1], f"recorded pieces of {recorded} positions"


def _is_equal(results: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert results.keys() == expected.keys()
    for name, part in results.items():
        assert torch.equal(part, expected[name]), name


def two_steps_of_training(case: CellCase, device: str, *, num_steps: int = 2) -> list[Tensor]:
    """Two layers run over two windows before either of them runs backward. Returns gradients and carried states.

    Weights and carried states change in place.
    """
    x_BTE, state, weights = make_inputs(case, torch.float32, num_rows=2, num_steps=num_steps, width_in=8)
    kernel = partial(getattr(gpu, case.kind), **case.arguments())

    def copied(part: Tensor) -> Tensor:
        return part.detach().clone().to(device)

    carried = [[copied(part) for part in state] for _ in range(2)]
    layers = [type(weights)(*(None if part is None else copied(part) for part in weights)) for _ in range(2)]
    leaves = [part.requires_grad_() for layer in layers for part in layer if part is not None]
    made: list[Tensor] = []
    for _ in range(2):
        losses = []
        for reset_BT in (None, make_resets(2, num_steps).to(device)):
            y_BTD = copied(x_BTE)
            for layer, kept in zip(layers, carried, strict=True):
                y_BTD, last = kernel(y_BTD, kept, reset_BT, layer)
                for part, new in zip(kept, last, strict=True):
                    part.copy_(new.detach())
            losses.append(y_BTD.square().sum())
        gradients = torch.autograd.grad(torch.stack(losses).sum(), leaves)
        made += [*gradients, *(part.clone() for kept in carried for part in kept)]
        with torch.no_grad():
            for part, gradient in zip(leaves, gradients, strict=True):
                part -= 0.01 * gradient
    return made


def keeps_apart_what_shares_a_recording(case: CellCase) -> None:
    """Layers, windows and steps that go through one recording: the same bits as launched directly."""
    expected = two_steps_of_training(case, "cpu")
    with recording(replay, piece_steps=4):
        results = two_steps_of_training(case, "cpu")
        # Forward and backward, with resets and without.
        assert [type(known) for known in gpu_graphs._recordings.values()] == [gpu_graphs._Recording] * 4
    assert all(torch.equal(part, other) for part, other in zip(results, expected, strict=True))


def serves_inference_and_what_follows_it(case: CellCase) -> None:
    """Recorded in inference mode, a window is replayed outside of it, where tensors of that mode can't be written."""
    x_BTE, state, weights = make_inputs(case, torch.float32, num_rows=2, num_steps=2)
    kernel = partial(getattr(gpu, case.kind), **case.arguments())
    with torch.no_grad():
        expected_BTD, _ = kernel(x_BTE, state, None, weights)
    with recording(replay, piece_steps=4):
        for mode in (torch.inference_mode, torch.inference_mode, torch.no_grad, torch.inference_mode):
            with mode():
                assert torch.equal(kernel(x_BTE, state, None, weights)[0], expected_BTD)


def records_anew_what_it_forgot(case: CellCase) -> None:
    """With room for one layout, three take turns."""
    windows = [make_inputs(case, torch.float32, num_rows=2, num_steps=num_steps) for num_steps in (1, 1, 2, 2, 1, 1)]
    expected = [outcome(gpu, case, inputs, None) for inputs in windows]
    with recording(replay, piece_steps=4, most_layouts=1):
        for inputs, launched in zip(windows, expected, strict=True):
            _is_equal(outcome(gpu, case, inputs, None), launched)
            assert len(gpu_graphs._recordings) == 1


def serves_two_threads(case: CellCase) -> None:
    """Two threads on one stream replay one recording in turn, not at once."""
    windows = [make_inputs(case, torch.float32, num_rows=2, num_steps=2) for _ in range(2)]
    with torch.no_grad():
        windows[1][0].mul_(2.0)
    expected = [outcome(gpu, case, inputs, None) for inputs in windows]
    with recording(replay, piece_steps=4), ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            results = pool.map(lambda inputs: outcome(gpu, case, inputs, None), windows)
            for result, launched in zip(results, expected, strict=True):
                _is_equal(result, launched)


def launches_where_recording_fails(case: CellCase) -> list[str]:
    """A layout whose recording fails runs all the same. Returns the lines said."""

    def refuse(steps: gpu_graphs.Steps, stage: gpu_graphs.Window, stream: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    inputs = make_inputs(case, torch.float32, num_rows=2, num_steps=2, width=10)
    expected = outcome(gpu, case, inputs, None)
    with recording(refuse, piece_steps=4) as said:
        for _ in range(3):
            _is_equal(outcome(gpu, case, inputs, None), expected)
    return said


def takes_an_empty_batch(case: CellCase) -> None:
    """No rows: no outputs, and no share in any gradient."""
    reset_BT = torch.zeros(0, 3, dtype=torch.bool)
    results = outcome(gpu, case, make_inputs(case, torch.float32, num_rows=0, num_steps=3, width=6), reset_BT)
    assert results["y"].shape == (0, 3, 6) and results["last0"].shape == (0, 6)
    assert results["gradient of bias_G"].numel() > 0 and not any(part.any() for part in results.values())
    x_BTE, (state_BD,), weights = _scan_inputs("rglru")
    y_BTD, last = gpu.rglru(x_BTE[:0], (state_BD[:0],), reset_BT, weights)
    assert y_BTD.shape == (0, 3, 6) and not torch.autograd.grad(y_BTD.sum() + last[0].sum(), weights.bias_G)[0].any()


def takes_tensors_that_lie_otherwise(case: CellCase) -> None:
    """Every input as a transposed view of every second element: the same as laid out side by side."""
    inputs, reset_BT = make_inputs(case, torch.float32, num_rows=2, num_steps=3), make_resets(2, 3)

    def spread(part: Tensor) -> Tensor:
        room = part.new_empty(*part.shape[::-1], 2)
        view = room[..., 0].permute(*reversed(range(part.dim())))
        return view.copy_(part).detach()

    x_BTE, state, weights = inputs
    parts = (None if part is None else spread(part).requires_grad_() for part in weights)
    spread_inputs = (
        spread(x_BTE).requires_grad_(),
        tuple(spread(part).requires_grad_() for part in state),
        type(weights)(*parts),
    )
    assert not spread_inputs[0].is_contiguous() and not spread_inputs[2].recurrent_GK.is_contiguous()
    results = outcome(gpu, case, spread_inputs, spread(reset_BT))
    assert_close(results, outcome(gpu, case, inputs, reset_BT), torch.float32)


def scans_as_the_reference(dtype: torch.dtype, num_steps: int, width: int) -> None:
    generator = torch.Generator().manual_seed(num_steps)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    leaves = (leaf(2, num_steps, width), leaf(2, num_steps, width), leaf(2, width))
    weights_BTD = torch.randn(2, num_steps, width, generator=generator, dtype=torch.float64)
    for reset_BT in (None, make_resets(2, num_steps)):
        results = []
        for kernels in (gpu, reference_scan):
            states_BTD = kernels.linear_scan(*leaves, reset_BT)
            results.append((states_BTD, *torch.autograd.grad((states_BTD.double() * weights_BTD).sum(), leaves)))
        named = [dict(zip(("states", "decay", "value", "initial"), parts, strict=True)) for parts in results]
        assert_close(*named, dtype)


def scan_cells_equal_the_reference() -> None:
    for name in SCAN_CELLS:
        results = [
            getattr(kernels, name)(*_scan_inputs(name)[:2], make_resets(2, 3), _scan_inputs(name)[2])
            for kernels in (gpu, reference_scan)
        ]
        torch.testing.assert_close(*results)


def _scan_inputs(name: str) -> tuple[Tensor, tuple[Tensor], MinimalWeights | RgLruWeights]:
    """Input [2, 3, 5], state of 6 units and weights of a cell on a linear scan."""
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).requires_grad_()

    x_BTE, state_BD, num_gates = leaf(2, 3, 5), leaf(2, 6), SCAN_CELLS[name]
    parts = (leaf(num_gates * 6, 5), leaf(num_gates * 6))
    return x_BTE, (state_BD,), RgLruWeights(*parts, leaf(6)) if name == "rglru" else MinimalWeights(*parts)
