"""What every cell promises, whatever kind, switches and implementation; a new entry of CELLS is tested as well."""

from itertools import product

import pytest
import torch

from reprise.cells.base import Cell, State
from reprise.cells.config import CELLS, CellConfig
from reprise.kernels.dispatch import IMPLEMENTATIONS
from reprise.runtime import UserError

_ON_OFF = (False, True)


def _valid_configs(kind: str) -> list[CellConfig]:
    configs = []
    for recurrence, coupled, norm, residual in product(CELLS[kind].recurrences, _ON_OFF, _ON_OFF, _ON_OFF):
        try:
            configs.append(CellConfig(kind, coupled, norm, residual, recurrence=recurrence, num_heads=2))
        except UserError:
            continue
    return configs


# An encoder promises other things: see test_attention.py.
CONFIGS = [config for kind, cell in CELLS.items() if cell.is_causal for config in _valid_configs(kind)]


def _name(config: CellConfig) -> str:
    return "-".join([config.kind, *config.kernel_switches()])


def _built(config: CellConfig, implementation: str = "auto") -> Cell:
    torch.manual_seed(0)
    fields = {**vars(config), "implementation": implementation}
    return CellConfig(**fields).build(6, 8)


def _state(cell: Cell, num_rows: int) -> State:
    """What some positions of another text leave behind."""
    x_BTE = torch.randn(num_rows, 4, 6, generator=torch.Generator().manual_seed(1))
    return tuple(part.detach() for part in cell(x_BTE, cell.initial_state(num_rows), None)[1])


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
def test_a_carried_state_may_be_overwritten_before_backward(config: CellConfig) -> None:
    """Training writes the next window's state over this one's before it takes the gradients."""
    x_BTE, reset_BT = _window()
    gradients = []
    for overwritten in (False, True):
        cell = _built(config)
        state = tuple(part.clone() for part in _state(cell, 3))
        y_BTD, last = cell(x_BTE, state, reset_BT)
        if overwritten:
            for part, new in zip(state, last, strict=True):
                part.copy_(new.detach())
        y_BTD.square().sum().backward()
        gradients.append([parameter.grad for parameter in cell.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


@pytest.mark.parametrize("config", CONFIGS, ids=_name)
def test_weights_move_between_implementations(config: CellConfig) -> None:
    x_BTE, reset_BT = _window()
    results = {}
    for name in IMPLEMENTATIONS:
        try:
            cell = _built(config, name)
            cell.load_state_dict(_built(config).state_dict())
            results[name] = cell(x_BTE, _state(cell, 3), reset_BT)[0]
        except UserError:
            continue
    assert {"auto", "reference"} < results.keys()
    torch.testing.assert_close(results, dict.fromkeys(results, results["reference"]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=_name)
def test_state_is_fp32_under_autocast(config: CellConfig, precision: torch.dtype) -> None:
    cell = _built(config)
    x_BTE, reset_BT = _window()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
        y_BTD, last = cell(x_BTE, cell.initial_state(3), reset_BT)
    assert y_BTD.dtype == (torch.float32 if cell.has_residual_stream else precision)
    assert all(part.dtype == torch.float32 for part in last)


def test_forget_gate_starts_open() -> None:
    cell = CellConfig("lstm", forget_bias=2.0).build(6, 8)
    bias_G = cell.get_parameter("bias").detach()
    assert bias_G.tolist() == [0.0] * 8 + [2.0] * 8 + [0.0] * 8


def test_weights_start_within_xavier_bounds() -> None:
    weight = CellConfig("lstm").build(20, 30).get_parameter("input_weight").detach()
    bound = (6.0 / (20 + 30)) ** 0.5
    assert 0.9 * bound < weight.abs().max().item() <= bound


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_recurrent_weights_start_as_wide_as_what_they_hear(kind: str) -> None:
    """Each unit's sum over what it hears starts with the same variance, in heads of any width."""
    torch.manual_seed(0)
    config = CellConfig(kind, False, recurrence="block", num_heads=4)
    weight_GK = config.build(8, 120).get_parameter("recurrent_weight").detach()
    assert weight_GK.shape[1] == 30
    bound = (6.0 / (30 + 30)) ** 0.5
    assert 0.95 * bound < weight_GK.abs().max().item() <= bound
    diagonal_G1 = CellConfig(kind, False, recurrence="diagonal").build(8, 120).get_parameter("recurrent_weight")
    assert diagonal_G1.shape[1] == 1
    assert diagonal_G1.abs().max().item() < 1.0, "no unit starts by feeding itself up"


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_unit_hears_its_head_or_itself_alone(kind: str) -> None:
    heard = {}
    for recurrence in ("full", "block", "diagonal"):
        config = CellConfig(kind, False, False, True, recurrence=recurrence, num_heads=2, implementation="eager")
        cell = _built(config, "eager")
        hidden_BD, *others = _state(cell, 1)
        hidden_BD.requires_grad_()
        y_BD, _ = cell.step(torch.zeros(1, 6), (hidden_BD, *others))
        heard[recurrence] = [
            torch.autograd.grad(y_BD[0, unit], hidden_BD, retain_graph=True)[0][0].nonzero().flatten().tolist()
            for unit in range(8)
        ]
    assert heard["full"] == [list(range(8))] * 8
    assert heard["block"] == [list(range(4))] * 4 + [list(range(4, 8))] * 4
    assert heard["diagonal"] == [[unit] for unit in range(8)]


def test_the_recurrence_says_how_many_weights_a_token_meets() -> None:
    counts = [
        CellConfig("gru", False, recurrence=recurrence, num_heads=4).build(8, 8).matmul_parameters()
        for recurrence in ("full", "block", "diagonal")
    ]
    assert counts == [3 * 8 * (8 + 8), 3 * 8 * (8 + 2), 3 * 8 * 8]


def test_heads_share_the_width_equally_or_are_refused() -> None:
    with pytest.raises(
        UserError, match="model.cell.num_heads=3: does not divide model.width=8; allowed: a divisor of 8"
    ):
        CellConfig("lstm", recurrence="block", num_heads=3).build(8, 8)
    CellConfig("lstm", recurrence="diagonal", num_heads=3).build(8, 8)


def test_coupling_saves_a_quarter_of_the_weights() -> None:
    counts = [CellConfig("lstm", coupled_gates=coupled).build(8, 8).matmul_parameters() for coupled in (True, False)]
    assert counts == [3 * 8 * 16, 4 * 8 * 16]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kind": "rnn"}, ("model.cell.kind=rnn", "lstm, gru")),
        ({"kind": "gru"}, ("model.cell.coupled_gates=true", "gru", "allowed: false")),
        ({"recurrence": "sparse"}, ("model.cell.recurrence=sparse", "allowed: full, block, diagonal")),
        ({"num_heads": 0}, ("model.cell.num_heads=0", "1 or more")),
        ({"implementation": "fast"}, ("model.cell.implementation=fast", ", ".join(IMPLEMENTATIONS))),
        (
            {"implementation": "library"},
            ("coupled_gates, layer_norm, temporal_residual", "auto, native, triton, eager, reference"),
        ),
        (
            {
                "kind": "gru",
                "coupled_gates": False,
                "layer_norm": False,
                "temporal_residual": False,
                "recurrence": "diagonal",
                "implementation": "library",
            },
            ("model.cell.implementation=library", "diagonal"),
        ),
    ],
)
def test_refuses_by_name(fields: dict[str, object], words: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as refusal:
        CellConfig(**fields)  # type: ignore[arg-type]
    assert all(word in str(refusal.value) for word in words)
