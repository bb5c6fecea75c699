"""The rivals do the same work as ours: only then is a ratio of times worth anything.

Legend: B rows, T time, D width.
"""

import pytest
import torch
from torch import Tensor, nn

from reprise.benchmarks import loss, resets, rivals
from reprise.benchmarks.machine import Place
from reprise.benchmarks.rivals import PackedDocuments, WordLanguageModel, WordModelTraining
from reprise.benchmarks.windows import Size, window_input, window_state

SIZE = Size(width=8, num_rows=5, num_steps=12)


def documents_by_hand(layer: nn.LSTM, x_BTD: Tensor, state: tuple[Tensor, ...], reset_BT: Tensor) -> list[Tensor]:
    """A row and a position after the other, the state set to zero where a document begins."""
    outputs, lasts = [], []
    for row in range(len(x_BTD)):
        parts = tuple(part[None, row : row + 1] for part in state)
        for t in range(x_BTD.shape[1]):
            if reset_BT[row, t]:
                parts = tuple(torch.zeros_like(part) for part in parts)
            y_11D, parts = layer(x_BTD[row : row + 1, t : t + 1], parts)
            outputs.append(y_11D.flatten())
        lasts.append([part.flatten() for part in parts])
    y_BTD = torch.stack(outputs).view_as(x_BTD)
    return [y_BTD, *(torch.stack(part) for part in zip(*lasts, strict=True))]


@pytest.mark.parametrize("length", [4, 12, 1])
def test_packed_documents_are_what_resets_mean(place: Place, length: int) -> None:
    layer = rivals.library_layer("lstm", SIZE, place, batch_first=True)
    assert isinstance(layer, nn.LSTM)
    reset_BT = resets.staggered_resets(SIZE, length)
    assert reset_BT.any(dim=1).all()
    x_BTD, state = window_input(SIZE, place), window_state(SIZE, place, num_parts=2)
    found = PackedDocuments(layer, reset_BT)(x_BTD, state)
    expected = documents_by_hand(layer, x_BTD, state, reset_BT)
    leaves = [x_BTD, *state, *layer.parameters()]
    weights = [torch.randn_like(part) for part in expected]
    for value, right in zip(found, expected, strict=True):
        torch.testing.assert_close(value, right)
    gradients = torch.autograd.grad(found, leaves, weights, allow_unused=True, materialize_grads=True)
    right_gradients = torch.autograd.grad(expected, leaves, weights, allow_unused=True, materialize_grads=True)
    for value, right in zip(gradients, right_gradients, strict=True):
        torch.testing.assert_close(value, right)


def test_rows_begin_their_documents_at_different_positions() -> None:
    reset_BT = resets.staggered_resets(Size(8, 4, 16), 8)
    assert [row.nonzero()[:, 0].tolist() for row in reset_BT] == [[0, 8], [2, 10], [4, 12], [6, 14]]


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize("bf16", [None, *rivals.BF16_WAYS])
def test_the_library_gives_every_gradient_in_every_format(place: Place, kind: str, bf16: str | None) -> None:
    side = rivals.library_side("library", kind, size=SIZE, place=place, bf16=bf16)
    gradients = side.run()
    num_state, num_weights = (2, 4) if kind == "lstm" else (1, 4)
    assert len(gradients) == 1 + num_state + num_weights
    assert all(float(gradient.float().abs().sum()) > 0 for gradient in gradients)
    assert gradients[0].dtype == (torch.bfloat16 if bf16 == "weights" else torch.float32)
    assert side.facts["products"] == ("fp32" if bf16 is None else "bf16")


@pytest.mark.parametrize("tied", [False, True])
def test_the_word_language_model_learns(tied: bool) -> None:
    torch.manual_seed(0)
    model = WordLanguageModel(11, 6, width=9, num_layers=2, tied=tied)
    tokens_TB = torch.arange(24).view(12, 2) % 11
    targets_TB = (tokens_TB + 2) % 11
    training = WordModelTraining(model, [(tokens_TB, targets_TB)], lr=1.0, clip_norm=0.25)

    def loss_now() -> float:
        log_probabilities_NV, _ = model(tokens_TB, model.initial_state(2))
        torch.testing.assert_close(log_probabilities_NV.exp().sum(dim=1), torch.ones(24))
        return float(nn.functional.nll_loss(log_probabilities_NV, targets_TB.flatten()).detach())

    before = loss_now()
    for _ in range(60):
        training()
    assert loss_now() < 0.7 * before
    assert (model.to_words.weight is model.embed.weight) == tied


def test_every_loss_is_the_same_loss(place: Place) -> None:
    layer = loss.Layer.random(30, 8, 20, device=place.device)
    exact = loss.exact_outcome(layer)
    found = {
        rival.name: loss.errors_of(rival.outcome(layer.read_as(rival.product), place), exact)
        for rival in loss.rivals(place)
    }
    assert {"loss_bf16", "full_bf16", "loss_fp32", "full_fp32"} <= found.keys()
    for name, errors in found.items():
        # The library's own loss in bf16 comes back rounded to bf16.
        bound = 2e-2 if name.endswith("bf16") else 1e-6
        assert max(errors.values()) < bound, (name, errors)


def test_an_error_is_seen(place: Place) -> None:
    layer = loss.Layer.random(30, 8, 20, device=place.device)
    exact = loss.exact_outcome(layer)
    spoilt = [exact[0] * 1.01, exact[1] * 0, exact[2], exact[3]]
    errors = loss.errors_of(spoilt, exact)
    assert errors == pytest.approx(
        {
            "loss_relative_error": 0.01,
            "hidden_gradient_error": 1.0,
            "weight_gradient_error": 0.0,
            "bias_gradient_error": 0.0,
        }
    )
