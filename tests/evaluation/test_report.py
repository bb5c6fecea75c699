"""Reports: pictures and the numbers behind them, of finished runs and of one that was just killed."""

import csv
import json
from pathlib import Path

import pytest

from reprise.evaluation.report import find_runs, read_curves, write_report
from reprise.runtime import UserError

COLUMNS = "progress/step,progress/tokens,train/loss,train/ppl,val/loss,val/ppl,val/bpb,perf/tokens_per_s\n"


def make_run(root: Path, name: str, *, result: bool = True) -> Path:
    """A run folder with two log rows and a validation."""
    folder = root / "runs" / name / "0123456789ab"
    folder.mkdir(parents=True)
    rows = "5,1000,4.5,90.0,,,,800.5\n10,2000,4.0,54.6,,,,810\n10,2000,,,4.25,70.1,2.5,\n"
    (folder / "metrics.csv").write_text(COLUMNS + rows)
    (folder / "overrides.txt").write_text(f"name={name}\noptim.lr=0.1\n")
    if result:
        scores = {"task": "pretrain", "val/loss": 4.25, "test/bpb": 2.6, "parameters": 77, "sample": "a/b"}
        (folder / "result.json").write_text(json.dumps(scores))
    return folder


def test_empty_cells_are_left_out_and_a_torn_row_is_passed_over(tmp_path: Path) -> None:
    file = make_run(tmp_path, "one") / "metrics.csv"
    whole = read_curves(file)
    assert len(whole) == 3
    assert whole[2] == {"progress/step": 10, "progress/tokens": 2000, "val/loss": 4.25, "val/ppl": 70.1, "val/bpb": 2.5}
    file.write_text(file.read_text() + "15,30")
    assert read_curves(file) == whole


def test_curves_are_over_tokens(tmp_path: Path) -> None:
    make_run(tmp_path, "one")
    run = find_runs(str(tmp_path / "runs" / "*"))[0]
    assert run.curve("train/loss") == ([1000.0, 2000.0], [4.5, 4.0])
    assert run.curve("val/loss") == ([2000.0], [4.25])
    assert run.curve("test/loss") == ([], [])
    assert run.result()["parameters"] == 77


@pytest.mark.parametrize("pattern", ["runs/*", "runs", "runs/one/*", "runs/**"])
def test_a_pattern_means_runs_at_or_below_it(tmp_path: Path, pattern: str) -> None:
    make_run(tmp_path, "one")
    if pattern != "runs/one/*":
        make_run(tmp_path, "two")
    found = find_runs(str(tmp_path / pattern))
    assert [run.path.parent.name for run in found] == (["one"] if pattern == "runs/one/*" else ["one", "two"])
    assert found[0].label == "one/012345 optim.lr=0.1"


def test_no_run_is_said_with_the_pattern(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with pytest.raises(UserError, match="no run there .looked for metrics.csv."):
        find_runs(str(tmp_path / "runs" / "*"))


def test_a_report_is_pictures_and_the_numbers_behind_them(tmp_path: Path) -> None:
    first, second = make_run(tmp_path, "one"), make_run(tmp_path, "two", result=False)
    files = write_report(str(tmp_path / "runs" / "*"), tmp_path / "report")
    assert {file.name for file in files} == {
        "curves.csv",
        "results.csv",
        "loss.png",
        "perplexity.png",
        "bits_per_byte.png",
        "speed.png",
    }
    for file in files:
        assert file.parent == tmp_path / "report"
        if file.suffix == ".png":
            assert file.read_bytes().startswith(b"\x89PNG\r\n") and file.stat().st_size > 5000
    with open(tmp_path / "report" / "curves.csv", newline="") as stream:
        points = list(csv.DictReader(stream))
    losses = [(point["run"], point["value"]) for point in points if point["metric"] == "train/loss"]
    assert losses == [(str(folder), value) for folder in (first, second) for value in ("4.5", "4.0")]
    with open(tmp_path / "report" / "results.csv", newline="") as stream:
        results = {row["run"]: row for row in csv.DictReader(stream)}
    assert results[str(first)]["val/loss"] == "4.25" and results[str(first)]["parameters"] == "77"
    assert results[str(second)]["val/loss"] == ""


def test_a_figure_without_numbers_is_left_out(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "one")
    (folder / "metrics.csv").write_text("progress/step,progress/tokens,train/loss\n5,1000,4.5\n")
    files = write_report(str(folder), tmp_path / "report")
    assert {file.name for file in files} == {"curves.csv", "results.csv", "loss.png"}
