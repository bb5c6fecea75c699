"""A session put together without the command line: it goes on from the checkpoints of its own model only."""

from collections.abc import Callable
from pathlib import Path

import pytest

from reprise.data.corpora import DataConfig
from reprise.data.shards import Corpus
from reprise.distributed.membership import ClusterConfig
from reprise.models import LanguageModel
from reprise.runtime import RunFolder, UserError, World
from reprise.training.budget import Budget, TrainConfig
from reprise.training.callbacks.recovery import StopSignal
from reprise.training.checkpoint import CheckpointConfig, weights_sha256
from reprise.training.optim import OptimConfig, ScheduleConfig
from reprise.training.session import Session, Settings


@pytest.fixture
def make_session(
    small_corpus: Corpus,
    small_data: DataConfig,
    make_model: Callable[..., LanguageModel],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., Session]:
    """A run of two steps in one folder, of a model that calls itself by the width given."""
    # Ctrl-C is to end the tests, not to save them.
    monkeypatch.setattr(StopSignal, "install", lambda self: None)

    def make(*, width: int) -> Session:
        cluster, checkpoint = ClusterConfig(precision="32-true"), CheckpointConfig()
        return Session(
            make_model(small_corpus.tokenizer.vocab_size),
            small_corpus,
            settings=Settings(
                small_data, TrainConfig(max_steps=2), OptimConfig(), ScheduleConfig(), cluster, checkpoint, seed=1
            ),
            budget=Budget(2, None),
            run=RunFolder(tmp_path),
            world=World(),
            identity={"model.width": width},
        )

    return make


def test_a_run_that_lacks_only_its_result_trains_no_more(make_session: Callable[..., Session]) -> None:
    first, again = make_session(width=12), make_session(width=12)
    assert first.fit()["progress/step"] == 2
    assert again.fit()["progress/step"] == 2
    assert weights_sha256(again.module.model) == weights_sha256(first.module.model)
    assert again.recovery.saved_step is None


def test_the_checkpoint_of_another_model_is_refused_by_its_file(
    make_session: Callable[..., Session], tmp_path: Path
) -> None:
    make_session(width=12).fit()
    (file,) = (tmp_path / "checkpoints").iterdir()
    with pytest.raises(UserError) as caught:
        make_session(width=24).fit()
    line = str(caught.value)
    assert line.startswith(f"{file}: saved with model.width=12, this command has model.width=24; give the settings")
