"""`metrics.csv` is only appended to, and each row is in it once, however often the run was killed."""

from pathlib import Path

import pytest

from reprise.evaluation.report import read_curves
from reprise.runtime import UserError
from reprise.training.metrics_file import COLUMNS, LoggerConfig, MetricsFile, check_installed


def row(step: int, kind: str = "train", loss: float = 2.5) -> dict[str, float]:
    return {"progress/step": float(step), "progress/tokens": step * 100.0, f"{kind}/loss": loss}


def test_rows_are_appended_under_fixed_columns(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.csv"
    file = MetricsFile(path)
    file.append(row(5))
    before = path.read_bytes()
    file.append(row(10, loss=0.1 + 0.2))
    assert path.read_bytes().startswith(before)
    assert path.read_text().splitlines()[0] == ",".join(COLUMNS)
    assert read_curves(path)[1] == {"progress/step": 10.0, "progress/tokens": 1000.0, "train/loss": 0.1 + 0.2}


def test_a_resumed_run_repeats_no_row_and_changes_none(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    first = MetricsFile(path)
    for step in (5, 10, 15):
        first.append(row(step))
    first.append(row(15, "val"))
    before = path.read_bytes()
    resumed = MetricsFile(path)
    for step in (10, 15, 20):
        resumed.append(row(step))
    resumed.append(row(15, "val"))
    resumed.append(row(20, "val"))
    assert path.read_bytes().startswith(before)
    kinds = [("train" if "train/loss" in line else "val", line["progress/step"]) for line in read_curves(path)]
    assert kinds == [("train", 5), ("train", 10), ("train", 15), ("val", 15), ("train", 20), ("val", 20)]


@pytest.mark.parametrize("cut", range(1, 12, 3))
def test_a_torn_last_row_is_dropped_and_written_again(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "metrics.csv"
    file = MetricsFile(path)
    file.append(row(5))
    whole = path.read_bytes()
    file.append(row(10))
    path.write_bytes(path.read_bytes()[:-cut])
    resumed = MetricsFile(path)
    assert path.read_bytes() == whole
    resumed.append(row(10))
    assert [line["progress/step"] for line in read_curves(path)] == [5, 10]


@pytest.mark.parametrize("content", ["", "progress/st"])
def test_a_torn_head_is_written_again(tmp_path: Path, content: str) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text(content)
    MetricsFile(path).append(row(5))
    assert path.read_text().splitlines()[0] == ",".join(COLUMNS)
    assert len(read_curves(path)) == 1


def test_numbers_come_back_exactly(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    file = MetricsFile(path)
    values = [1e-30, 3.0, 2**60 + 0.0, -0.5, float("inf"), 1 / 3]
    for step, value in enumerate(values):
        file.append(row(step, loss=value))
    assert [line["train/loss"] for line in read_curves(path)] == values


def test_a_name_that_is_no_column_is_our_own_mistake(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="train/lost"):
        MetricsFile(tmp_path / "metrics.csv").append({"progress/step": 1.0, "train/lost": 2.0})


def test_a_tracker_that_is_not_installed_is_said_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_installed(LoggerConfig())
    with pytest.raises(UserError, match=r"logger=tensorboard: the package is absent; .*reprise-lm\[tensorboard\]"):
        check_installed(LoggerConfig(tensorboard=True))
