"""The language model: carried state, dropout that depends on keys only, tied weights, loss, counts."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from reprise.cells.config import CellConfig
from reprise.models import LanguageModel, ModelConfig
from reprise.runtime import UserError

VOCAB_SIZE = 50


def _model(**fields: Any) -> LanguageModel:
    torch.manual_seed(0)
    return ModelConfig(**{"num_layers": 2, "width": 16, **fields}).build(vocab_size=VOCAB_SIZE)


def _tokens(num_rows: int = 4, num_steps: int = 12) -> Tensor:
    return torch.randint(VOCAB_SIZE, (num_rows, num_steps), generator=torch.Generator().manual_seed(1))


def test_chunks_with_carried_state_equal_one_pass() -> None:
    model, tokens_BT = _model(), _tokens()
    targets_BT = tokens_BT.roll(-1, 1)
    whole = model.loss_sum(model(tokens_BT, model.initial_state(4))[0], targets_BT)
    state, total = model.initial_state(4), torch.zeros(())
    for start in range(0, 12, 3):
        hidden_BTD, state = model(tokens_BT[:, start : start + 3], state)
        total = total + model.loss_sum(hidden_BTD, targets_BT[:, start : start + 3])
    torch.testing.assert_close(total, whole, rtol=1e-6, atol=0.0)


def test_document_before_a_reset_changes_no_bit_of_the_loss_after_it() -> None:
    model, tokens_BT = _model(dropout=0.3, embedding_dropout=0.2), _tokens()
    changed_BT = tokens_BT.clone()
    changed_BT[:, :5] = (tokens_BT[:, :5] + 1) % VOCAB_SIZE
    reset_BT = torch.zeros(4, 12, dtype=torch.bool)
    reset_BT[:, 5] = True
    keys_B = torch.arange(4)
    losses = []
    for given_BT in (tokens_BT, changed_BT):
        hidden_BTD, _ = model(given_BT, model.initial_state(4), reset_BT, keys_B)
        losses.append(model.loss_sum(hidden_BTD[:, 5:], tokens_BT[:, 5:]))
    assert torch.equal(*losses)


def test_dropout_of_a_row_depends_on_its_key_only() -> None:
    model, tokens_BT = _model(dropout=0.4, embedding_dropout=0.3), _tokens()
    keys_B = torch.tensor([11, 12, 13, -14])
    together_BTD, _ = model(tokens_BT, model.initial_state(4), None, keys_B)
    order = torch.tensor([3, 1])
    apart_BTD, _ = model(tokens_BT[order], model.initial_state(2), None, keys_B[order])
    assert torch.equal(apart_BTD == 0.0, together_BTD[order] == 0.0)
    torch.testing.assert_close(apart_BTD, together_BTD[order], rtol=1e-5, atol=1e-6)
    again_BTD, _ = model(tokens_BT, model.initial_state(4), None, keys_B)
    assert torch.equal(again_BTD, together_BTD)


def test_dropout_leaves_the_global_generator_alone() -> None:
    model = _model(dropout=0.4, embedding_dropout=0.3)
    before = torch.get_rng_state()
    model(_tokens(), model.initial_state(4), None, torch.arange(4))
    assert torch.equal(before, torch.get_rng_state())


def test_output_mask_is_locked_over_time_and_differs_between_rows() -> None:
    model = _model(dropout=0.5)
    hidden_BTD, _ = model(_tokens(), model.initial_state(4), None, torch.arange(4))
    dropped_BTD = hidden_BTD == 0.0
    assert torch.equal(dropped_BTD, dropped_BTD[:, :1].expand_as(dropped_BTD))
    assert not torch.equal(dropped_BTD[0], dropped_BTD[1])
    assert 0.2 < dropped_BTD.float().mean().item() < 0.8


def test_without_keys_there_is_no_dropout() -> None:
    tokens_BT = _tokens()
    plain, dropping = _model(), _model(dropout=0.5, embedding_dropout=0.5)
    expected_BTD, _ = plain(tokens_BT, plain.initial_state(4))
    assert torch.equal(dropping.train()(tokens_BT, dropping.initial_state(4))[0], expected_BTD)


def test_embedding_dropout_drops_a_word_at_all_its_positions() -> None:
    model = _model(embedding_dropout=0.5, num_layers=1)
    tokens_BT = torch.arange(8).repeat(2, 3)
    mask_BT = model._word_mask(tokens_BT, torch.tensor([1, 2]))
    assert torch.equal(mask_BT[:, :8], mask_BT[:, 8:16]) and torch.equal(mask_BT[:, :8], mask_BT[:, 16:])
    assert set(mask_BT.flatten().tolist()) == {0.0, 2.0}
    assert not torch.equal(mask_BT[0], mask_BT[1])


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_loss_equals_cross_entropy_of_the_logits(tie_embeddings: bool) -> None:
    model, tokens_BT = _model(tie_embeddings=tie_embeddings), _tokens()
    hidden_BTD, _ = model(tokens_BT, model.initial_state(4))
    targets_BT = tokens_BT.roll(-1, 1)
    targets_BT[:, -1] = -100
    logits_NV = model.logits(hidden_BTD).flatten(0, 1)
    expected = cross_entropy(logits_NV, targets_BT.flatten(), reduction="sum")
    torch.testing.assert_close(model.loss_sum(hidden_BTD, targets_BT), expected)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_every_parameter_gets_a_gradient(kind: str) -> None:
    cell = CellConfig(kind, coupled_gates=kind == "lstm")
    model = _model(dropout=0.1, embedding_dropout=0.1, tie_embeddings=False, layer_residual=True, cell=cell)
    hidden_BTD, _ = model(_tokens(), model.initial_state(4), None, torch.arange(4))
    torch.autograd.backward(model.loss_sum(hidden_BTD, _tokens().roll(-1, 1)))
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), name


def test_tie_survives_every_way_of_loading() -> None:
    model, source = _model(), _model()
    model.load_state_dict(copy.deepcopy(source.state_dict()), assign=True)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.embedding.weight += 1.0
    hidden_BTD = torch.ones(1, 1, 16)
    assert torch.allclose(copied.logits(hidden_BTD), model.logits(hidden_BTD) + 16.0, atol=1e-4)
    assert copied.num_parameters() == source.num_parameters()


def test_learns_a_sequence() -> None:
    model, tokens_BT = _model(dropout=0.1), _tokens(2, 12)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for step in range(60):
        hidden_BTD, _ = model(tokens_BT, model.initial_state(2), None, torch.tensor([step, 1000 + step]))
        loss = model.loss_sum(hidden_BTD[:, :-1], tokens_BT[:, 1:]) / 22
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 3.5 and losses[-1] < 1.5


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_bf16_autocast_stays_near_fp32(kind: str) -> None:
    cell = CellConfig(kind, False, False, False)
    model, tokens_BT = _model(cell=cell), _tokens()
    exact = model.loss_sum(model(tokens_BT, model.initial_state(4))[0], tokens_BT)
    with torch.autocast("cpu", torch.bfloat16):
        hidden_BTD, state = model(tokens_BT, model.initial_state(4))
        rounded = model.loss_sum(hidden_BTD, tokens_BT)
    assert rounded.dtype == torch.float32
    assert all(part.dtype == torch.float32 for layer in state for part in layer)
    torch.testing.assert_close(rounded, exact, rtol=1e-2, atol=0.0)


def test_counts() -> None:
    model = _model()
    layer = 3 * 16 * 32
    assert model.num_parameters() == 2 * (layer + 3 * 16 + 3 * 16) + VOCAB_SIZE * 16 + VOCAB_SIZE
    assert model.flops_per_token() == 6 * (2 * layer + VOCAB_SIZE * 16)
    untied = _model(tie_embeddings=False)
    assert untied.num_parameters() == model.num_parameters() + VOCAB_SIZE * 16
    assert untied.flops_per_token() == model.flops_per_token()


@pytest.mark.parametrize(
    ("num_layers", "width", "low", "high"),
    [(1, 256, 8e6, 9e6), (1, 512, 17e6, 19e6), (3, 1024, 50e6, 54e6), (8, 4096, 0.90e9, 1.00e9)],
    ids=["tiny", "small", "medium", "large"],
)
def test_sizes(num_layers: int, width: int, low: float, high: float) -> None:
    with torch.device("meta"):
        model = ModelConfig(num_layers=num_layers, width=width).build(vocab_size=32_000)
    assert low < model.num_parameters() < high


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_layers": 0}, "model.num_layers=0: allowed: 1 or more"),
        ({"width": -1}, "model.width=-1: allowed: 1 or more"),
        ({"dropout": 1.0}, "model.dropout=1.0: allowed: 0 up to but not including 1"),
        ({"embedding_dropout": -0.1}, "model.embedding_dropout=-0.1: allowed: 0 up to but not including 1"),
    ],
)
def test_refuses_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        ModelConfig(**fields)


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_narrow_embedding_is_projected_before_the_output_layer(tie_embeddings: bool) -> None:
    narrow, wide = _model(embedding_width=8, tie_embeddings=tie_embeddings), _model(tie_embeddings=tie_embeddings)
    assert narrow.embedding.weight.shape == (VOCAB_SIZE, 8)
    assert narrow.num_parameters() < wide.num_parameters()
    assert narrow.flops_per_token() < wide.flops_per_token()
    tokens_BT = _tokens(2, 5)
    hidden_BTD, _ = narrow(tokens_BT, narrow.initial_state(2))
    expected = cross_entropy(narrow.logits(hidden_BTD).flatten(0, 1), tokens_BT.flatten(), reduction="sum")
    total = narrow.loss_sum(hidden_BTD, tokens_BT)
    torch.testing.assert_close(total, expected)
    total.backward()
    assert all(parameter.grad is not None for parameter in narrow.parameters())
