"""The linear scan and the cells on it: every implementation against the reference in float64, and what resets promise.

Legend: B rows, T time, D width, E input width, G all gates side by side.
"""

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import ACCURACY, LENGTHS, make_resets, relative_rms
from torch import Tensor

from reprise.kernels import cpu_scan, native, reference_scan, scan
from reprise.kernels.reference_scan import MinimalWeights, RgLruWeights
from reprise.runtime import UserError

NUM_GATES = {"mingru": 2, "minlstm": 3, "rglru": 3}
CELLS = tuple(NUM_GATES)
needs_native = pytest.mark.skipif(native.library() is None, reason="no native library here")
FAST = [pytest.param(scan, id="eager"), pytest.param(cpu_scan, id="native", marks=needs_native)]
ALL = [pytest.param(reference_scan, id="reference"), *FAST]
DTYPES = (torch.float32, torch.bfloat16)


def _leaf(*shape: int, dtype: torch.dtype, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype).requires_grad_()


def _scan_inputs(shape: tuple[int, int, int], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Decay between 0 and 1, value, and a non-zero initial state in fp32 or fp64."""
    num_rows, _, width = shape
    decay_BTD = torch.sigmoid(2.0 + _leaf(*shape, dtype=torch.float64, seed=seed).detach()).to(dtype).requires_grad_()
    kept = torch.promote_types(dtype, torch.float32)
    return [decay_BTD, _leaf(*shape, dtype=dtype, seed=seed + 1), _leaf(num_rows, width, dtype=kept, seed=seed + 2)]


def _cell_inputs(
    cell: str, shape: tuple[int, int, int], dtype: torch.dtype, *, width_in: int = 7, seed: int = 0
) -> list[Tensor]:
    """x, initial state, and the weights in the order of their tuple."""
    num_rows, num_steps, width = shape
    num_gates = NUM_GATES[cell]
    kept = torch.promote_types(dtype, torch.float32)
    inputs = [
        _leaf(num_rows, num_steps, width_in, dtype=dtype, seed=seed),
        _leaf(num_rows, width, dtype=kept, seed=seed + 1),
        _leaf(num_gates * width, width_in, dtype=dtype, seed=seed + 2, scale=width_in**-0.5),
        _leaf(num_gates * width, dtype=dtype, seed=seed + 3, scale=0.3),
    ]
    if cell == "rglru":
        # Decays of about 0.9 to 0.999 a step.
        inputs.append((_leaf(width, dtype=torch.float64, seed=seed + 4).detach() + 6.0).to(dtype).requires_grad_())
    return inputs


def _scan_outcome(kernels: ModuleType, inputs: list[Tensor], reset_BT: Tensor | None) -> dict[str, Tensor]:
    states_BTD = kernels.linear_scan(*inputs, reset_BT)
    return _with_gradients({"h": states_BTD}, dict(zip(("decay", "value", "initial"), inputs, strict=True)))


def _cell_outcome(kernels: ModuleType, cell: str, inputs: list[Tensor], reset_BT: Tensor | None) -> dict[str, Tensor]:
    x_BTE, initial_BD, *parts = inputs
    weights = RgLruWeights(*parts) if cell == "rglru" else MinimalWeights(*parts)
    y_BTD, (last_BD,) = getattr(kernels, cell)(x_BTE, (initial_BD,), reset_BT, weights)
    names = ("x", "initial", *weights._fields)
    return _with_gradients({"y": y_BTD, "last": last_BD}, dict(zip(names, inputs, strict=True)))


def _with_gradients(results: dict[str, Tensor], leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """Results, and the gradients of a random weighting of them all."""
    generator = torch.Generator().manual_seed(9)
    weighted = [
        (part.double() * torch.randn(part.shape, generator=generator, dtype=torch.float64)).sum()
        for part in results.values()
    ]
    gradients = torch.autograd.grad(torch.stack(weighted).sum(), list(leaves.values()))
    named = {f"gradient of {name}": part for name, part in zip(leaves, gradients, strict=True)}
    return {name: part.detach() for name, part in (results | named).items()}


def _in_float64(inputs: list[Tensor]) -> list[Tensor]:
    return [part.detach().double().requires_grad_() for part in inputs]


def _assert_accurate(value: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype) -> None:
    assert value.keys() == expected.keys()
    for name, part in value.items():
        error = relative_rms(part, expected[name])
        assert error <= ACCURACY[dtype], f"{name}: {error}"


@pytest.mark.parametrize("num_steps", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernels", ALL)
def test_scan_of_every_length_equals_float64(kernels: ModuleType, dtype: torch.dtype, num_steps: int) -> None:
    inputs, reset_BT = _scan_inputs((3, num_steps, 19), dtype), make_resets(3, num_steps)
    results = _scan_outcome(kernels, inputs, reset_BT)
    assert results["h"].dtype == torch.float32
    assert [results[f"gradient of {name}"].dtype for name in ("decay", "value", "initial")] == [
        part.dtype for part in inputs
    ]
    _assert_accurate(results, _scan_outcome(reference_scan, _in_float64(inputs), reset_BT), dtype)


@pytest.mark.parametrize("num_steps", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("kernels", ALL)
def test_cell_of_every_length_equals_float64(
    kernels: ModuleType, cell: str, dtype: torch.dtype, num_steps: int
) -> None:
    inputs, reset_BT = _cell_inputs(cell, (3, num_steps, 19), dtype), make_resets(3, num_steps)
    results = _cell_outcome(kernels, cell, inputs, reset_BT)
    assert results["y"].dtype == dtype and results["last"].dtype == torch.float32
    _assert_accurate(results, _cell_outcome(reference_scan, cell, _in_float64(inputs), reset_BT), dtype)


def _compare_at_random(data: st.DataObject) -> None:
    cell = data.draw(st.sampled_from((*CELLS, "linear_scan")))
    kernels = data.draw(st.sampled_from([scan, cpu_scan] if native.library() is not None else [scan]))
    dtype = data.draw(st.sampled_from(DTYPES))
    shape = tuple(data.draw(st.integers(1, most)) for most in (5, 70, 70))
    seed = data.draw(st.integers(0, 2**16))
    share = data.draw(st.sampled_from((0.0, 0.05, 1.0)))
    reset_BT = torch.rand(shape[:2], generator=torch.Generator().manual_seed(seed)) < share
    if cell == "linear_scan":
        inputs = _scan_inputs(shape, dtype, seed)
        results = _scan_outcome(kernels, inputs, reset_BT)
        expected = _scan_outcome(reference_scan, _in_float64(inputs), reset_BT)
    else:
        inputs = _cell_inputs(cell, shape, dtype, seed=seed)
        results = _cell_outcome(kernels, cell, inputs, reset_BT)
        expected = _cell_outcome(reference_scan, cell, _in_float64(inputs), reset_BT)
    # A few numbers make no root mean square to rely on.
    if min(part.numel() for part in results.values()) >= 16:
        _assert_accurate(results, expected, dtype)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_shapes_equal_float64(data: st.DataObject) -> None:
    _compare_at_random(data)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(st.data())
def test_a_thousand_random_shapes_equal_float64(data: st.DataObject) -> None:
    _compare_at_random(data)


@pytest.mark.parametrize("kernels", [reference_scan, scan], ids=["reference", "eager"])
@pytest.mark.parametrize("cell", [*CELLS, "linear_scan"])
def test_gradients_equal_numerical_ones(cell: str, kernels: ModuleType) -> None:
    reset_BT = make_resets(2, 4)
    if cell == "linear_scan":
        assert torch.autograd.gradcheck(
            lambda *parts: kernels.linear_scan(*parts, reset_BT), _scan_inputs((2, 4, 3), torch.float64)
        )
        return

    def run(x_BTE: Tensor, initial_BD: Tensor, *parts: Tensor) -> tuple[Tensor, Tensor]:
        weights = RgLruWeights(*parts) if cell == "rglru" else MinimalWeights(*parts)
        y_BTD, last = getattr(kernels, cell)(x_BTE, (initial_BD,), reset_BT, weights)
        return y_BTD, last[0]

    assert torch.autograd.gradcheck(run, _cell_inputs(cell, (2, 4, 3), torch.float64, width_in=2))


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def _mingru_step(h: float, z: float, n: float, _: float) -> float:
    return (1.0 - _sigmoid(z)) * h + _sigmoid(z) * n


def _minlstm_step(h: float, f: float, i: float, n: float) -> float:
    total = _sigmoid(f) + _sigmoid(i)
    return _sigmoid(f) / total * h + _sigmoid(i) / total * n


def _rglru_step(h: float, r: float, i: float, u: float) -> float:
    decay = _sigmoid(3.0) ** (8.0 * _sigmoid(r))
    return decay * h + math.sqrt(1.0 - decay**2) * _sigmoid(i) * u


@pytest.mark.parametrize(
    ("cell", "step"), [("mingru", _mingru_step), ("minlstm", _minlstm_step), ("rglru", _rglru_step)]
)
def test_reference_follows_the_papers_equations(cell: str, step: Callable[[float, float, float, float], float]) -> None:
    gates = [[0.3, -1.2, 0.7], [-2.0, 0.4, -0.9], [1.5, 2.5, 0.2]]
    num_gates = NUM_GATES[cell]
    # With the identity for a weight, the inputs are the gates.
    parts: list[Any] = [torch.eye(num_gates, dtype=torch.float64), torch.zeros(num_gates, dtype=torch.float64)]
    if cell == "rglru":
        parts.append(torch.tensor([3.0], dtype=torch.float64))
    weights = RgLruWeights(*parts) if cell == "rglru" else MinimalWeights(*parts)
    x_BTE = torch.tensor([[row[:num_gates] for row in gates]], dtype=torch.float64)
    initial_BD = torch.tensor([[0.8]], dtype=torch.float64)
    y_BTD, _ = getattr(reference_scan, cell)(x_BTE, (initial_BD,), None, weights)
    h, expected = 0.8, []
    for row in gates:
        h = step(h, *row)
        expected.append(h)
    assert y_BTD[0, :, 0].tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kernels", ALL)
def test_nothing_comes_through_a_reset(kernels: ModuleType) -> None:
    """Not even NaN and infinity: forward from before it, and backward from after it."""
    decay_BTD, value_BTD, initial_BD = (part.detach() for part in _scan_inputs((2, 9, 19), torch.float32))
    reset_BT = torch.zeros(2, 9, dtype=torch.bool)
    reset_BT[1, 5] = True
    fresh_BTD = kernels.linear_scan(decay_BTD[1:, 5:], value_BTD[1:, 5:], torch.zeros(1, 19), None)
    broken = [part.clone() for part in (decay_BTD, value_BTD, initial_BD)]
    broken[0][1, :5], broken[1][1, :5], broken[2][1] = torch.inf, torch.nan, torch.nan
    states_BTD = kernels.linear_scan(*broken, reset_BT)
    assert states_BTD[1, 4].isnan().all()
    assert torch.equal(states_BTD[1:, 5:], fresh_BTD)

    leaves = [part.clone().requires_grad_() for part in (decay_BTD, value_BTD, initial_BD)]
    states_BTD = kernels.linear_scan(*leaves, reset_BT)
    grad_BTD = torch.ones_like(states_BTD)
    grad_BTD[1, 5:] = torch.nan
    grad_decay_BTD, grad_value_BTD, grad_initial_BD = torch.autograd.grad(states_BTD, leaves, grad_BTD)
    clean_BTD = kernels.linear_scan(*[part[:, :5] if part.dim() == 3 else part for part in leaves], None)
    expected = torch.autograd.grad(clean_BTD, leaves, torch.ones_like(clean_BTD))
    assert torch.equal(grad_decay_BTD[1, :5], expected[0][1, :5])
    assert torch.equal(grad_value_BTD[1, :5], expected[1][1, :5])
    assert torch.equal(grad_initial_BD[1], expected[2][1])


@pytest.mark.parametrize("kernels", ALL)
@pytest.mark.parametrize("cell", CELLS)
def test_gates_far_out_stay_finite(cell: str, kernels: ModuleType) -> None:
    inputs = _cell_inputs(cell, (2, 33, 19), torch.float32)
    with torch.no_grad():
        inputs[3].mul_(400.0)
        if cell == "rglru":
            inputs[4].copy_(torch.linspace(-60.0, 60.0, 19))
    for name, part in _cell_outcome(kernels, cell, inputs, make_resets(2, 33)).items():
        assert part.isfinite().all(), name


@pytest.mark.parametrize("kernels", ALL)
def test_a_decay_of_almost_one_keeps_its_digits(kernels: ModuleType) -> None:
    """1 - a^2 of an a that rounds to one in fp32 is not zero."""
    inputs = _cell_inputs("rglru", (2, 65, 19), torch.float32)
    with torch.no_grad():
        inputs[4].fill_(17.0)
    expected = _cell_outcome(reference_scan, "rglru", _in_float64(inputs), None)
    _assert_accurate(_cell_outcome(kernels, "rglru", inputs, None), expected, torch.float32)


@pytest.mark.parametrize("kernels", ALL)
@pytest.mark.parametrize("cell", CELLS)
def test_autocast_changes_products_only(cell: str, kernels: ModuleType) -> None:
    inputs = _cell_inputs(cell, (3, 9, 19), torch.float32)
    expected = _cell_outcome(reference_scan, cell, _in_float64(inputs), None)
    with torch.autocast("cpu", torch.bfloat16):
        results = _cell_outcome(kernels, cell, inputs, None)
    assert results["y"].dtype == torch.bfloat16 and results["last"].dtype == torch.float32
    assert relative_rms(results["last"], expected["last"]) > ACCURACY[torch.float32], "the products ran in fp32"
    _assert_accurate(results, expected, torch.bfloat16)


@pytest.mark.parametrize("kernels", FAST)
def test_a_carried_state_may_be_overwritten_before_backward(kernels: ModuleType) -> None:
    for reset_BT in (None, make_resets(2, 5)):
        results = []
        for new_value in (None, 3.0):
            decay_BTD, value_BTD, initial_BD = (part.detach() for part in _scan_inputs((2, 5, 19), torch.float32))
            decay_BTD.requires_grad_()
            states_BTD = kernels.linear_scan(decay_BTD, value_BTD, initial_BD, reset_BT)
            if new_value is not None:
                initial_BD.fill_(new_value)
            results.append(torch.autograd.grad(states_BTD.sum(), decay_BTD)[0])
        assert torch.equal(*results)


@needs_native
class TestNative:
    """What only the custom operators promise."""

    def test_formats_it_lacks_are_refused_by_name(self) -> None:
        with pytest.raises(
            UserError, match="implementation=native: no native products in float64; allowed: auto, eager"
        ):
            cpu_scan.linear_scan(*_scan_inputs((1, 2, 3), torch.float64), None)
        x_BTE, initial_BD, *parts = _cell_inputs("mingru", (1, 2, 3), torch.float16)
        with pytest.raises(UserError, match="no native products in float16"):
            cpu_scan.mingru(x_BTE, (initial_BD,), None, MinimalWeights(*parts))

    @pytest.mark.parametrize("shape", [(1, 9, 100), (5, 9, 19)])
    def test_bits_depend_neither_on_threads_nor_on_other_rows(self, shape: tuple[int, int, int]) -> None:
        threads = torch.get_num_threads()
        inputs = _cell_inputs("rglru", shape, torch.float32)
        try:
            torch.set_num_threads(1)
            alone = _cell_outcome(cpu_scan, "rglru", inputs, None)
            torch.set_num_threads(3)
            together = _cell_outcome(cpu_scan, "rglru", inputs, None)
        finally:
            torch.set_num_threads(threads)
        assert all(torch.equal(alone[name], together[name]) for name in alone)
        scan_inputs = [part.detach() for part in _scan_inputs(shape, torch.float32)]
        first_row = cpu_scan.linear_scan(*(part[:1] for part in scan_inputs), None)
        assert torch.equal(cpu_scan.linear_scan(*scan_inputs, None)[:1], first_row)

    def test_operators_keep_torch_s_rules(self) -> None:
        reset_BT = make_resets(2, 4)
        checks = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic")
        scan_inputs = _scan_inputs((2, 4, 19), torch.float32)
        torch.library.opcheck(torch.ops.reprise.linear_scan.default, (*scan_inputs, reset_BT), test_utils=checks)
        rate_D = torch.rand(19).requires_grad_()
        for cell, num_gates in NUM_GATES.items():
            gates_BTG, bias_G = torch.randn(2, 4, num_gates * 19, requires_grad=True), torch.zeros(num_gates * 19)
            arguments = (cell, gates_BTG, bias_G.requires_grad_(), rate_D if cell == "rglru" else None)
            for resets in (None, reset_BT):
                torch.library.opcheck(
                    torch.ops.reprise.scan_cell.default, (*arguments, scan_inputs[2], resets), test_utils=checks
                )

    @pytest.mark.parametrize("cell", CELLS)
    def test_compiles_into_one_graph(self, cell: str) -> None:
        inputs, reset_BT = _cell_inputs(cell, (2, 5, 19), torch.float32), make_resets(2, 5)
        compiled = ModuleType("compiled")
        setattr(compiled, cell, torch.compile(getattr(cpu_scan, cell), backend="aot_eager", fullgraph=True))
        results = _cell_outcome(compiled, cell, inputs, reset_BT)
        expected = _cell_outcome(cpu_scan, cell, inputs, reset_BT)
        for name, part in results.items():
            torch.testing.assert_close(part, expected[name], rtol=1e-6, atol=1e-6, msg=name)

    @pytest.mark.parametrize("cell", CELLS)
    def test_plain_code_agrees(self, cell: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """What a processor without this one's instructions runs."""
        portable = native.load("portable")
        monkeypatch.setattr(native, "library", lambda: portable)
        for dtype in DTYPES:
            inputs, reset_BT = _cell_inputs(cell, (3, 65, 19), dtype), make_resets(3, 65)
            expected = _cell_outcome(reference_scan, cell, _in_float64(inputs), reset_BT)
            _assert_accurate(_cell_outcome(cpu_scan, cell, inputs, reset_BT), expected, dtype)
