"""Small corpora to prepare, and where the benchmark texts are."""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from reprise.data.corpora import DataConfig, PrepareConfig
from reprise.data.prepare import prepare
from reprise.data.shards import Corpus

WORDS = [
    "the",
    "of",
    "and",
    "a",
    "river",
    "stone",
    "light",
    "under",
    "over",
    "many",
    "people",
    "walked",
    "home",
    "before",
    "winter",
    "came",
    "with",
    "bread",
    "salt",
    "water",
    "letters",
    "from",
    "their",
    "old",
    "town",
    "across",
    "the",
    "valley",
    "where",
    "bells",
    "rang",
    "at",
    "noon",
]


def make_sentences(num: int, *, seed: int) -> str:
    """`num` lines of words, the same for the same seed."""
    generator = random.Random(seed)
    return "".join(" ".join(generator.choices(WORDS, k=generator.randint(3, 12))) + ".\n" for _ in range(num))


@pytest.fixture(scope="session")
def sentences() -> Callable[..., str]:
    return make_sentences


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    """Write a .jsonl file of `num_documents` records under tmp_path."""

    def write(num_documents: int, name: str = "source/corpus.jsonl") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps({"text": make_sentences(4, seed=number)}) + "\n" for number in range(num_documents)]
        path.write_text("".join(lines))
        return path

    return write


@pytest.fixture(scope="session")
def sotu(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """The default corpus, prepared once for all tests."""
    return prepare(DataConfig(), PrepareConfig(), tmp_path_factory.mktemp("sotu"))


@pytest.fixture
def ptb_folder() -> Path:
    """The Penn Treebank files, which no repository may hold: absent ones skip the test."""
    shared = Path(__file__).resolve().parents[3] / "shared" / "data"
    folder = Path(os.environ.get("REPRISE_BENCHMARK_DATA", shared)) / "ptb"
    if not (folder / "ptb.train.txt").is_file():
        pytest.skip(f"no Penn Treebank files in {folder}; set REPRISE_BENCHMARK_DATA")
    return folder
