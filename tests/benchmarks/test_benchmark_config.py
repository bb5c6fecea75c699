"""Settings of a benchmark: what is refused by name, which sizes a case means, what a digest sees."""

import pytest
from commands import settings, told

from reprise.benchmarks.config import NAMES, BenchmarkConfig


@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_has_its_file(name: str) -> None:
    assert settings("task=benchmark", f"benchmark={name}").benchmark.name == name
    assert told("task=benchmark", f"benchmark={name}", "debug=quick") == ""


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("benchmark=recurence", "benchmark=recurence: no such option; did you mean recurrence?"),
        ("benchmark.name=attention", "benchmark.name=attention: one of recurrence, resets, loss, scan, step"),
        ("benchmark.repetition=9", "benchmark.repetition: no such key; did you mean benchmark.repetitions?"),
        ("benchmark.repetitions=3", "benchmark.repetitions=3: at least 9"),
        ("benchmark.cases=all", "benchmark.cases=all: one of main, cross, grid"),
        ("benchmark.width=0", "benchmark.width=0: at least 1"),
        ("benchmark.rows=[4,0]", "benchmark.rows=[4, 0]: each at least 1"),
        ("benchmark.widths=[a]", "benchmark.widths=[a]: not of the right type, Integer expected"),
        ("benchmark.vocab_size=1", "benchmark.vocab_size=1: at least 2"),
        ("benchmark.min_repetition_ms=-1", "benchmark.min_repetition_ms=-1.0: at least 0"),
        ("benchmark.document_tokens=200", "benchmark.document_tokens=200: at most benchmark.num_steps=128"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(word: str, line: str) -> None:
    message = told("task=benchmark", word)
    assert message.startswith(line) and "\n" not in message


def test_a_gpu_that_is_not_there_is_missed_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert told("task=benchmark", "cluster=one_gpu").startswith("cluster.accelerator=gpu: 0 GPUs here")


def test_cases_name_the_sizes_beside_the_main_one() -> None:
    def sizes(cases: str) -> list[tuple[int, int]]:
        return BenchmarkConfig(width=2, num_rows=10, widths=[1, 2, 3], rows=[10, 20], cases=cases).further_sizes()

    assert sizes("main") == []
    assert sizes("cross") == [(1, 10), (2, 20), (3, 10)]
    assert sizes("grid") == [(1, 10), (1, 20), (2, 20), (3, 10), (3, 20)]


def test_a_benchmark_does_not_make_another_run_of_the_other_tasks() -> None:
    def digest(*words: str) -> str:
        return settings(*words).digest()

    for task in ("prepare", "pretrain", "evaluate", "generate", "report"):
        assert digest(f"task={task}", "benchmark=loss", "benchmark.width=8") == digest(f"task={task}")
    assert digest("task=benchmark", "benchmark.width=8") != digest("task=benchmark")
    assert digest("task=benchmark", "benchmark=step", "model.width=64") != digest("task=benchmark", "benchmark=step")
