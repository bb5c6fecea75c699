"""The step that is measured is the step that training takes, and its parts are all of it."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from reprise.benchmarks import machine, step
from reprise.benchmarks.config import BenchmarkConfig
from reprise.benchmarks.machine import Place
from reprise.benchmarks.training_step import Laps, TrainingStep
from reprise.cells.config import CellConfig
from reprise.data.corpora import DataConfig, PrepareConfig
from reprise.data.prepare import prepare
from reprise.data.shards import Corpus
from reprise.distributed.membership import ClusterConfig
from reprise.models import LanguageModel, ModelConfig
from reprise.training.budget import TrainConfig
from reprise.training.checkpoint import CheckpointConfig
from reprise.training.optim import OptimConfig, ScheduleConfig
from reprise.training.session import Settings

DATA = DataConfig(corpus="pydoc", vocab_size=400, num_lanes=4, window=8, eval_lanes=2)
NUM_LAYERS = 2


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Corpus]:
    root: Path = tmp_path_factory.mktemp("prepared")
    yield prepare(DATA, PrepareConfig(num_threads=1), root)
    shutil.rmtree(root)


@pytest.fixture
def model(corpus: Corpus) -> LanguageModel:
    torch.manual_seed(3)
    config = ModelConfig(num_layers=NUM_LAYERS, width=16, embedding_width=12, dropout=0.2, cell=CellConfig("lstm"))
    return config.build(vocab_size=corpus.tokenizer.vocab_size)


@pytest.fixture
def training() -> Settings:
    return Settings(
        data=DATA,
        train=TrainConfig(max_steps=5, accumulate=2, clip_norm=0.5),
        optim=OptimConfig(lr=1e-2, weight_decay=0.1),
        schedule=ScheduleConfig(kind="constant", warmup_steps=0),
        cluster=ClusterConfig(precision="32-true"),
        checkpoint=CheckpointConfig(),
        seed=1,
    )


def test_a_step_by_hand_is_a_step_of_training(
    model: LanguageModel, corpus: Corpus, training: Settings, place: Place, tmp_path: Path
) -> None:
    start = {name: weight.clone() for name, weight in model.state_dict().items()}
    session = step._session(model, corpus, training, tmp_path / "real", num_steps=5)
    with step._signal_handlers_kept():
        session.fit()
    trained = {name: weight.clone() for name, weight in model.state_dict().items()}
    model.load_state_dict(start)
    by_hand = TrainingStep(step._session(model, corpus, training, tmp_path / "hand", num_steps=None), place)
    for _ in range(5):
        by_hand()
    assert any(not torch.equal(weight, start[name]) for name, weight in trained.items())
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, trained[name], msg=name)


def test_the_parts_of_a_step_are_in_order_and_all_of_it(
    model: LanguageModel, corpus: Corpus, training: Settings, place: Place, tmp_path: Path
) -> None:
    one_group = replace(training, train=replace(training.train, accumulate=1))
    by_hand = TrainingStep(step._session(model, corpus, one_group, tmp_path / "step", num_steps=None), place)
    laps = Laps(by_hand, place)
    for _ in range(3):
        laps()
    assert list(laps.medians(last=2)) == [
        "data",
        "embedding forward",
        "layer 0 forward",
        "layer 1 forward",
        "loss forward",
        "loss backward",
        "layer 1 backward",
        "layer 0 backward",
        "embedding backward",
        "clip",
        "optimizer",
    ]
    assert min(laps.medians(last=2).values()) > 0
    # The hooks are gone: a step without laps tells nobody.
    by_hand()
    assert not model.embedding._forward_hooks


def test_step(
    tiny: BenchmarkConfig,
    place: Place,
    model: LanguageModel,
    corpus: Corpus,
    training: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step, "_LOOP_WINDOW_STEPS", 2)
    monkeypatch.setattr(machine, "_PRODUCT_SHAPES", ((64, 64, 64), (128, 64, 32)))
    outcome = step.measure(tiny, place, model=model, corpus=corpus, training=training)
    result = json.loads(json.dumps(outcome.result()))
    assert {
        "step_over_ceiling",
        "step_over_word_language_model",
        "step_over_tied_word_language_model",
        "pretrain_loop_over_step",
    } <= result["ratios"].keys()
    sides = {record["side"]: record for record in result["records"]}
    assert sides["step"]["tokens"] == DATA.num_lanes * DATA.window == sides["word_language_model"]["tokens"]
    assert result["flops_per_step"] == model.flops_per_token() * DATA.num_lanes * DATA.window
    assert sum(part["share"] for part in result["parts"]) == pytest.approx(1.0)
    assert result["profile"][0]["ms_per_step"] >= result["profile"][-1]["ms_per_step"] > 0
    assert result["precision"] == "32-true" and result["ceiling_tflops"] > 0
    # One repetition: the rate of the step's products over that of the fastest large one.
    ceiling = sides[result["ceiling_is"]]
    share = result["flops_per_step"] / sides["step"]["seconds"][0] / (ceiling["flops"] / ceiling["seconds"][0])
    assert (
        result["ratios"]["step_over_ceiling"]["low"] / 20 < share < result["ratios"]["step_over_ceiling"]["high"] * 20
    )
