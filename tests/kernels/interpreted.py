"""Checks of the Triton kernels that run where Triton interprets them: in a process of its own, on the CPU.

Triton decides when it is imported whether it compiles or interprets, for a whole process. So every check here is a
function that a test sends to such a process; a failed assertion comes back as the test's own.

Legend: B rows, T time, D width.
"""

import math
from collections.abc import Iterator
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
from reprise.kernels.gpu_window import CellInputs

ALL_ON = CellCase("lstm", True, True, True)


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


def is_an_operator_of_pytorch(case: CellCase) -> None:
    """PyTorch's own checks of an operator: schema, fake results, autograd, and what torch.compile traces."""
    x_BTE, state, weights = make_inputs(case, torch.float32, num_rows=2, num_steps=2)
    kind = "coupled_lstm" if case.coupled_gates else case.kind
    parts = {"cell_BD": None, "candidate_bias_D": None} | dict(zip(("hidden_BD", "cell_BD"), state, strict=False))
    inputs = CellInputs(
        x_BTE=x_BTE, reset_BT=make_resets(2, 2), kind=kind, product=torch.bfloat16, **(parts | weights._asdict())
    )
    torch.library.opcheck(torch.ops.reprise.triton_cell.default, (*inputs, True))
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
def recording(record: Any, *, piece_steps: int, fewest_steps: int = 1) -> Iterator[list[str]]:
    """Windows go through stages, as on a GPU, with `record` in place of CUDA's. Gives the lines that are said."""
    names = ("can_record", "record", "say", "_PIECE_STEPS", "_FEWEST_STEPS")
    before = [getattr(gpu_graphs, name) for name in names]
    said: list[str] = []
    for name, value in zip(names, (lambda device: True, record, said.append, piece_steps, fewest_steps), strict=True):
        setattr(gpu_graphs, name, value)
    try:
        yield said
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(gpu_graphs, name, value)


def replays_what_it_recorded(case: CellCase) -> None:
    """A window in two pieces of two lengths, through stages: the same bits as launched directly, for new inputs too."""
    recorded = []

    def record(steps: gpu_graphs.Steps, stage: gpu_graphs.Window) -> Any:
        recorded.append(stage.num_steps)
        return partial(steps, stage)

    x_BTE, state, weights = make_inputs(case, torch.float32, num_rows=2, num_steps=3)
    for scale in (1.0, 1.0, 2.0):
        inputs = ((x_BTE.detach() * scale).requires_grad_(), state, weights)
        expected = outcome(gpu, case, inputs, make_resets(2, 3))
        with recording(record, piece_steps=2):
            results = outcome(gpu, case, inputs, make_resets(2, 3))
        for name, part in results.items():
            assert torch.equal(part, expected[name]), f"{name} at scale {scale}"
    assert recorded == [1, 2, 2, 1], f"recorded pieces of {recorded} positions"


def launches_where_recording_fails(case: CellCase) -> list[str]:
    """A layout whose recording fails runs all the same. Returns the lines said."""

    def refuse(steps: gpu_graphs.Steps, stage: gpu_graphs.Window) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    inputs = make_inputs(case, torch.float32, num_rows=2, num_steps=2, width=10)
    expected = outcome(gpu, case, inputs, None)
    with recording(refuse, piece_steps=4) as said:
        for _ in range(3):
            results = outcome(gpu, case, inputs, None)
            assert all(torch.equal(part, expected[name]) for name, part in results.items()), "other results"
    return said


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
    generator = torch.Generator().manual_seed(0)
    x_BTE, state_BD = torch.randn(2, 3, 5, generator=generator), torch.randn(2, 6, generator=generator)
    for name, num_gates in (("mingru", 2), ("minlstm", 3), ("rglru", 3)):
        weights = [torch.randn(num_gates * 6, 5, generator=generator), torch.randn(num_gates * 6, generator=generator)]
        kind: Any = reference_scan.RgLruWeights if name == "rglru" else reference_scan.MinimalWeights
        given = kind(*weights, torch.ones(6)) if name == "rglru" else kind(*weights)
        results = [
            getattr(kernels, name)(x_BTE, (state_BD,), make_resets(2, 3), given) for kernels in (gpu, reference_scan)
        ]
        torch.testing.assert_close(*results)
