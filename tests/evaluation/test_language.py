"""Scores that do not depend on how the text was cut, and generation that does what its settings say."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.cells.config import CellConfig
from reprise.evaluation.language import (
    GenerateConfig,
    Tally,
    choose_token,
    generate,
    language_scores,
    perplexity,
)
from reprise.models import LanguageModel, ModelConfig
from reprise.runtime import UserError

VOCAB_SIZE = 30
EOS = 0


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    torch.manual_seed(3)
    cell = CellConfig("lstm", coupled_gates=True, layer_norm=True, temporal_residual=True)
    built = ModelConfig(num_layers=2, width=16, dropout=0.4, cell=cell).build(vocab_size=VOCAB_SIZE).eval()
    with torch.no_grad():
        # Sharper than fresh weights, so that a choice is a choice, and <eos> seldom ends a text.
        built.embedding.weight *= 3
        built.output_bias[EOS] = -8.0
    return built


def text(model: LanguageModel, prompt: list[int], *, seed: int = 1, **fields: Any) -> list[int]:
    chosen = GenerateConfig(**{"num_tokens": 25, "temperature": 1.0, "top_p": None, **fields})
    return list(generate(model, prompt, settings=chosen, eos_id=EOS, seed=seed))


def test_tally_adds_in_float64() -> None:
    """In float32 not one of the thousand would arrive."""
    tally = Tally()
    tally.add(torch.tensor(2.0**27), 1)
    for _ in range(1000):
        tally.add(torch.tensor(0.1), 1)
    assert tally.nll_sum == pytest.approx(2.0**27 + 1000 * float(torch.tensor(0.1)), abs=1e-3)
    assert tally.num_tokens == 1001


def test_a_tally_of_nothing_has_no_loss() -> None:
    assert math.isnan(Tally().loss)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 30, width=32), min_size=1, max_size=40), st.data())
def test_tally_does_not_see_how_tokens_are_batched(losses: list[float], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(losses)), max_size=5)))
    tally = Tally()
    for start, stop in zip([0, *cuts], [*cuts, len(losses)], strict=True):
        tally.add(torch.tensor(losses[start:stop], dtype=torch.float64).sum(), stop - start)
    assert tally.num_tokens == len(losses)
    assert tally.loss == pytest.approx(math.fsum(losses) / len(losses), rel=1e-12, abs=1e-12)
    assert perplexity(tally.loss) == pytest.approx(math.exp(math.fsum(losses) / len(losses)), rel=1e-11)


def test_scores_under_their_names() -> None:
    tally = Tally()
    tally.add(torch.tensor(60.0), 20)
    scores = language_scores("val", tally, num_bytes=50, num_words=None)
    assert scores == pytest.approx({"val/loss": 3.0, "val/ppl": math.exp(3), "val/bpb": 60 / math.log(2) / 50})
    words = language_scores("test", tally, num_bytes=50, num_words=10)
    assert words["test/ppl_word"] == pytest.approx(math.exp(6))


def test_a_perplexity_that_overflows_is_infinite() -> None:
    assert perplexity(800.0) == math.inf
    assert perplexity(0.0) == 1.0


def test_the_same_seed_gives_the_same_text(model: LanguageModel) -> None:
    assert text(model, [4, 5]) == text(model, [4, 5])
    assert text(model, [4, 5], seed=2) != text(model, [4, 5])
    torch.manual_seed(99)
    torch.rand(3)
    before = torch.get_rng_state()
    assert text(model, [4, 5]) == text(model, [4, 5])
    assert torch.equal(torch.get_rng_state(), before)


def greedy(model: LanguageModel, prompt: list[int], num_tokens: int) -> list[int]:
    """The likeliest next token each time, from the whole text read anew."""
    ids: list[int] = []
    for _ in range(num_tokens):
        with torch.no_grad():
            hidden_BTD, _ = model(torch.tensor([[EOS, *prompt, *ids]]), model.initial_state(1))
            token = int(model.logits(hidden_BTD[:, -1:]).argmax())
        if token == EOS:
            break
        ids.append(token)
    return ids


@pytest.mark.parametrize("prompt", [[], [7], [3, 9, 27, 11]])
def test_temperature_zero_is_greedy_and_the_state_holds_the_whole_text(model: LanguageModel, prompt: list[int]) -> None:
    assert text(model, prompt, temperature=0) == greedy(model, prompt, 25)


@pytest.mark.parametrize("seed", [1, 2])
def test_top_one_and_a_tiny_nucleus_are_greedy(model: LanguageModel, seed: int) -> None:
    assert text(model, [3], seed=seed, top_k=1) == text(model, [3], temperature=0)
    assert text(model, [3], seed=seed, top_p=1e-9) == text(model, [3], temperature=0)


def test_text_ends_with_the_document_or_at_the_length_asked_for(model: LanguageModel) -> None:
    assert len(text(model, [5], num_tokens=7, top_k=5)) == 7
    with torch.no_grad():
        model.output_bias[EOS] += 100
        assert text(model, [5]) == []
        model.output_bias[EOS] -= 100


@settings(max_examples=100, deadline=None)
@given(
    logits=st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=20),
    temperature=st.floats(0.05, 5),
    top_k=st.none() | st.integers(1, 25),
    top_p=st.none() | st.floats(1e-12, 1.0),
    seed=st.integers(0, 2**31),
)
def test_there_is_always_a_token_and_it_is_among_the_allowed(
    logits: list[float], temperature: float, top_k: int | None, top_p: float | None, seed: int
) -> None:
    logits_V = torch.tensor(logits)
    chosen = GenerateConfig(temperature=temperature, top_k=top_k, top_p=top_p)
    token = choose_token(logits_V, chosen, torch.Generator().manual_seed(seed))
    assert 0 <= token < len(logits)
    better = int((logits_V > logits_V[token]).sum())
    assert top_k is None or better < top_k
    if top_p is not None:
        mass = torch.softmax(logits_V.double() / temperature, 0)[logits_V > logits_V[token]].sum().item()
        assert mass < top_p + 1e-5


def test_draws_follow_the_probabilities() -> None:
    logits_V = torch.tensor([0.5, 0.3, 0.2]).log()
    generator = torch.Generator().manual_seed(1)
    chosen = GenerateConfig(temperature=1.0, top_p=None)
    counts = torch.bincount(torch.tensor([choose_token(logits_V, chosen, generator) for _ in range(4000)]), minlength=3)
    assert (counts / 4000 - torch.tensor([0.5, 0.3, 0.2])).abs().max() < 0.04
    # The token that crosses the threshold stays: of 0.5 + 0.3 only the third is cut.
    nucleus = GenerateConfig(temperature=1.0, top_p=0.6)
    assert {choose_token(logits_V, nucleus, generator) for _ in range(200)} == {0, 1}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_tokens": 0}, "generate.num_tokens=0: at least 1"),
        ({"temperature": -1.0}, "generate.temperature=-1.0: at least 0"),
        ({"top_k": 0}, "generate.top_k=0: at least 1"),
        ({"top_p": 0.0}, "generate.top_p=0.0: more than 0, at most 1"),
        ({"top_p": 1.5}, "generate.top_p=1.5: more than 0, at most 1"),
    ],
)
def test_refuses_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        GenerateConfig(**fields)
