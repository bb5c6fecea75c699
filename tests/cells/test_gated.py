"""What every cell promises, whatever kind, switches and implementation; a new entry of CELLS is tested as well."""

from itertools import product

import pytest
import torch

from reprise.cells.base import Cell, State
from reprise.cells.config import CELLS, CellConfig
from reprise.runtime import UserError

_ON_OFF = (False, True)


def _valid_configs(kind: str) -> list[CellConfig]:
    configs = []
    for coupled_gates, layer_norm, temporal_residual in product(_ON_OFF, repeat=3):
        try:
            configs.append(CellConfig(kind, coupled_gates, layer_norm, temporal_residual))
        except UserError:
            continue
    return configs


CONFIGS = [config for kind in CELLS for config in _valid_configs(kind)]


def _name(config: CellConfig) -> str:
    return "-".join([config.kind, *config.switches()])


def _built(config: CellConfig, implementation: str = "auto") -> Cell:
    torch.manual_seed(0)
    fields = {**vars(config), "implementation": implementation}
    return CellConfig(**fields).build(6, 8)


def _state(cell: Cell, num_rows: int) -> State:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(num_rows, cell.width, generator=generator) for _ in range(cell.state_parts))


def _window(num_rows: int = 3, num_steps: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    reset_BT = torch.zeros(num_rows, num_steps, dtype=torch.bool)
    reset_BT[1, 4], reset_BT[2, 0], reset_BT[0, 7] = True, True, True
    return torch.randn(num_rows, num_steps, 6, generator=generator), reset_BT


@pytest.mark.parametrize("config", CONFIGS, ids=_name)
def test_step_unrolled_equals_forward(config: CellConfig) -> None:
    cell = _built(config)
    x_BTE, _ = _window()
    state = _state(cell, 3)
    y_BTD, last = cell(x_BTE, state, None)
    for t in range(x_BTE.shape[1]):
        y_BD, state = cell.step(x_BTE[:, t], state)
        torch.testing.assert_close(y_BD, y_BTD[:, t], rtol=1e-5, atol=1e-6)
    for part, expected in zip(state, last, strict=True):
        torch.testing.assert_close(part, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("config", CONFIGS, ids=_name)
def test_two_windows_with_the_state_carried_equal_one(config: CellConfig) -> None:
    cell = _built(config)
    x_BTE, reset_BT = _window()
    y_BTD, last = cell(x_BTE, _state(cell, 3), reset_BT)
    first_BTD, state = cell(x_BTE[:, :6], _state(cell, 3), reset_BT[:, :6])
    second_BTD, state = cell(x_BTE[:, 6:], state, reset_BT[:, 6:])
    torch.testing.assert_close(torch.cat((first_BTD, second_BTD), dim=1), y_BTD, rtol=1e-5, atol=1e-6)
    for part, expected in zip(state, last, strict=True):
        torch.testing.assert_close(part, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("config", CONFIGS, ids=_name)
def test_what_stands_before_a_reset_changes_no_bit_after_it(config: CellConfig) -> None:
    cell = _built(config)
    x_BTE, reset_BT = _window()
    changed_BTE = x_BTE.clone()
    changed_BTE[1, :4] += 100.0
    y_BTD, last = cell(x_BTE, _state(cell, 3), reset_BT)
    other_BTD, other_last = cell(changed_BTE, _state(cell, 3), reset_BT)
    assert torch.equal(y_BTD[1, 4:], other_BTD[1, 4:])
    assert all(torch.equal(part, other) for part, other in zip(last, other_last, strict=True))


@pytest.mark.parametrize("config", CONFIGS, ids=_name)
def test_every_parameter_gets_a_gradient(config: CellConfig) -> None:
    cell = _built(config)
    x_BTE, reset_BT = _window()
    y_BTD, _ = cell(x_BTE, cell.initial_state(3), reset_BT)
    y_BTD.square().sum().backward()
    for name, parameter in cell.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), name


@pytest.mark.parametrize("config", CONFIGS, ids=_name)
def test_weights_move_between_implementations(config: CellConfig) -> None:
    x_BTE, reset_BT = _window()
    results = {}
    names = ("eager", "reference") if config.switches() else ("library", "eager", "reference")
    for name in names:
        cell = _built(config, name)
        cell.load_state_dict(_built(config, "reference").state_dict())
        results[name] = cell(x_BTE, _state(cell, 3), reset_BT)[0]
    for name in names:
        torch.testing.assert_close(results[name], results["reference"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=_name)
def test_state_is_fp32_under_autocast(config: CellConfig, precision: torch.dtype) -> None:
    cell = _built(config)
    x_BTE, reset_BT = _window()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
        y_BTD, last = cell(x_BTE, cell.initial_state(3), reset_BT)
    assert y_BTD.dtype == precision
    assert all(part.dtype == torch.float32 for part in last)


def test_forget_gate_starts_open() -> None:
    cell = CellConfig("lstm", forget_bias=2.0).build(6, 8)
    bias_G = cell.get_parameter("bias").detach()
    assert bias_G.tolist() == [0.0] * 8 + [2.0] * 8 + [0.0] * 8


def test_weights_start_within_xavier_bounds() -> None:
    weight = CellConfig("lstm").build(20, 30).get_parameter("input_weight").detach()
    bound = (6.0 / (20 + 30)) ** 0.5
    assert 0.9 * bound < weight.abs().max().item() <= bound


def test_coupling_saves_a_quarter_of_the_weights() -> None:
    counts = [CellConfig("lstm", coupled_gates=coupled).build(8, 8).matmul_parameters() for coupled in (True, False)]
    assert counts == [3 * 8 * 16, 4 * 8 * 16]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kind": "rnn"}, ("model.cell.kind=rnn", "lstm, gru")),
        ({"kind": "gru"}, ("model.cell.coupled_gates=true", "gru", "allowed: false")),
        ({"recurrence": "diagonal"}, ("model.cell.recurrence=diagonal", "allowed: full")),
        ({"implementation": "fast"}, ("model.cell.implementation=fast", "auto, library, eager, reference")),
        ({"implementation": "library"}, ("coupled_gates, layer_norm, temporal_residual", "auto, eager, reference")),
    ],
)
def test_refuses_by_name(fields: dict[str, str], words: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as refusal:
        CellConfig(**fields)  # type: ignore[arg-type]
    assert all(word in str(refusal.value) for word in words)
