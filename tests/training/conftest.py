"""A small prepared corpus, and a run's training put together without the command line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from reprise.cells.config import CellConfig
from reprise.data.corpora import DataConfig, PrepareConfig
from reprise.data.prepare import prepare
from reprise.data.shards import Corpus
from reprise.models import LanguageModel, ModelConfig


@pytest.fixture(scope="session")
def small_data() -> DataConfig:
    return DataConfig(corpus="pydoc", vocab_size=400, num_lanes=6, window=16, eval_lanes=3)


@pytest.fixture(scope="session")
def small_corpus(small_data: DataConfig, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """The help topics of the running Python, prepared once for these tests."""
    root: Path = tmp_path_factory.mktemp("prepared")
    return prepare(small_data, PrepareConfig(num_threads=1), root)


@pytest.fixture
def make_model() -> Callable[..., LanguageModel]:
    """The same weights at every call."""

    def make(vocab_size: int, **fields: Any) -> LanguageModel:
        torch.manual_seed(7)
        cell = CellConfig("lstm", coupled_gates=True, layer_norm=True, temporal_residual=True)
        return ModelConfig(**{"num_layers": 2, "width": 12, "cell": cell, **fields}).build(vocab_size=vocab_size)

    return make
