"""Sizes at which every benchmark takes its real path in a moment."""

import pytest
import torch

from reprise.benchmarks.config import BenchmarkConfig
from reprise.benchmarks.machine import Place


@pytest.fixture
def place() -> Place:
    return Place(torch.device("cpu"))


@pytest.fixture
def tiny() -> BenchmarkConfig:
    return BenchmarkConfig(
        repetitions=9,
        warmup=1,
        min_repetition_ms=0,
        width=8,
        num_rows=3,
        num_steps=6,
        widths=[4, 8],
        rows=[1, 3],
        vocab_size=40,
        num_tokens=48,
        document_tokens=4,
    )
