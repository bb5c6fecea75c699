"""minGRU, minLSTM and RG-LRU: what they start from, what they keep, what they refuse. The contract: test_gated.py."""

from typing import Any

import pytest
import torch

from reprise.cells.base import Cell
from reprise.cells.config import CellConfig
from reprise.kernels.dispatch import KERNELS, pick
from reprise.kernels.reference_scan import DECAY_POWER
from reprise.runtime import UserError

KINDS = ("mingru", "minlstm", "rglru")


def _config(kind: str, **fields: Any) -> CellConfig:
    off = dict.fromkeys(("coupled_gates", "layer_norm", "temporal_residual"), False)
    return CellConfig(**{"kind": kind, **off, **fields})


def _cell(kind: str, width_in: int = 6, width: int = 8) -> Cell:
    torch.manual_seed(0)
    return _config(kind).build(width_in, width)


def test_rglru_decays_start_where_the_paper_has_them() -> None:
    cell = _cell("rglru", width=4096)
    decay_D = torch.sigmoid(cell.get_parameter("decay_logit").detach().double()) ** DECAY_POWER
    assert 0.9 <= decay_D.min().item() < 0.9005 and 0.9985 < decay_D.max().item() <= 0.999 + 1e-6
    assert decay_D.mean().item() == pytest.approx((0.9 + 0.999) / 2, abs=2e-3)


def test_rglru_keeps_the_scale_of_its_input_whatever_its_decay() -> None:
    """The root of 1 - a^2 is there for that: after many steps of noise the state is as large as what went in."""
    cell = _cell("rglru", 64, 512)
    with torch.no_grad():
        # Input gates open.
        cell.get_parameter("bias")[512:1024] = 8.0
        cell.get_parameter("input_weight")[512:1024] = 0.0
        y_BTD, _ = cell(torch.randn(4, 4000, 64), cell.initial_state(4), None)
        source_rms = cell.get_parameter("input_weight")[1024:].square().sum(dim=1).mean().sqrt()
    assert y_BTD[:, 2000:].square().mean().sqrt().item() == pytest.approx(source_rms.item(), rel=0.1)


@pytest.mark.parametrize("kind", ["mingru", "minlstm"])
def test_state_stays_between_what_it_was_and_what_comes_in(kind: str) -> None:
    """Their two shares add up to one, so an input of zero draws the state towards the candidate's bias of zero."""
    cell = _cell(kind)
    state = (torch.full((2, 8), 5.0),)
    y_BTD, (last_BD,) = cell(torch.zeros(2, 20, 6), state, None)
    # All gates start at a half.
    torch.testing.assert_close(y_BTD[:, 0], torch.full((2, 8), 2.5))
    assert (y_BTD.diff(dim=1) <= 0.0).all() and (last_BD >= 0.0).all() and last_BD.max() < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_learns_to_recall_a_sign_from_steps_before(kind: str) -> None:
    """The first input's sign, asked for after noise that says nothing."""
    torch.manual_seed(1)
    cell = _config(kind).build(2, 16)
    readout = torch.nn.Linear(16, 1)
    optimizer = torch.optim.Adam([*cell.parameters(), *readout.parameters()], lr=0.03)
    losses = []
    for _ in range(150):
        sign_B = torch.randint(2, (32,)).float()
        x_BTE = torch.zeros(32, 8, 2)
        x_BTE[:, 0, 0] = 2.0 * sign_B - 1.0
        x_BTE[:, 1:, 1] = torch.randn(32, 7)
        y_BTD, _ = cell(x_BTE, cell.initial_state(32), None)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(readout(y_BTD[:, -1])[:, 0], sign_B)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 0.6 and losses[-1] < 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_carried_state_goes_on_in_fp32_under_autocast(kind: str) -> None:
    cell = _cell(kind)
    x_BTE = torch.randn(2, 12, 6, generator=torch.Generator().manual_seed(2))
    with torch.autocast("cpu", torch.bfloat16):
        _, whole = cell(x_BTE, cell.initial_state(2), None)
        _, state = cell(x_BTE[:, :7], cell.initial_state(2), None)
        assert state[0].dtype == torch.float32
        _, carried = cell(x_BTE[:, 7:], state, None)
    # As close as fp32 keeps a state; one rounded to bf16 in between would be off by about 1e-3.
    torch.testing.assert_close(carried[0], whole[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kind", "num_gates"), [("mingru", 2), ("minlstm", 3), ("rglru", 3)])
def test_counts_one_product(kind: str, num_gates: int) -> None:
    cell = _cell(kind, 6, 8)
    assert cell.matmul_parameters() == num_gates * 8 * 6
    extra = 8 if kind == "rglru" else 0
    assert sum(part.numel() for part in cell.parameters()) == num_gates * 8 * (6 + 1) + extra


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"coupled_gates": True}, ("model.cell.coupled_gates=true", "has no such switch")),
        ({"layer_norm": True}, ("model.cell.layer_norm=true", "has no such switch")),
        ({"temporal_residual": True}, ("model.cell.temporal_residual=true", "has no such switch")),
        ({"recurrence": "block"}, ("model.cell.recurrence=block", "allowed: full")),
        ({"implementation": "library"}, ("model.cell.implementation=library", "eager, reference")),
    ],
)
def test_refuses_by_name(kind: str, fields: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as refusal:
        _config(kind, **fields).build(6, 8)
    assert all(word in str(refusal.value) for word in words)


@pytest.mark.parametrize("kind", [*KINDS, "linear_scan"])
def test_every_implementation_can_be_picked_or_says_why_not(kind: str) -> None:
    assert pick(kind, "cpu", torch.float32, "reference") is KERNELS[kind]["reference"]
    assert pick(kind, "cpu", torch.float32, "eager") is KERNELS[kind]["eager"]
    assert pick(kind, "cpu", torch.float32, "auto") in (KERNELS[kind]["native"], KERNELS[kind]["eager"])
    # What has no native code for its format must not be sent there.
    assert pick(kind, "cpu", torch.float64, "auto") is KERNELS[kind]["eager"]
