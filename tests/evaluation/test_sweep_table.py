"""The table of a sweep: a row a job, there while jobs run, and updated by the same sweep given again."""

import csv
from pathlib import Path

import pytest

from reprise.evaluation.sweep_table import SweepTable
from reprise.runtime import UserError


def rows(folder: Path) -> dict[str, dict[str, str]]:
    """The table by overrides."""
    with open(folder / "results.csv", newline="") as stream:
        return {row["overrides"]: row for row in csv.DictReader(stream)}


def finish(folder: Path, overrides: list[str], loss: float) -> None:
    with SweepTable(folder).job(overrides) as record:
        record.update({"run": "runs/x/1", "val/loss": loss, "sample": "left out", "task": "pretrain"})


def test_a_finished_job_has_its_results(tmp_path: Path) -> None:
    finish(tmp_path, ["model/cell=gru", "optim.lr=1e-3"], 3.5)
    row = rows(tmp_path)["model/cell=gru optim.lr=1e-3"]
    assert row["status"] == "finished" and row["error"] == ""
    assert row["val/loss"] == "3.5" and row["run"] == "runs/x/1" and row["test/bpb"] == ""
    assert "sample" not in row


def test_a_running_job_is_in_the_table_so_that_a_kill_leaves_one(tmp_path: Path) -> None:
    finish(tmp_path, ["seed=1"], 3.0)
    with SweepTable(tmp_path).job(["seed=2"]):
        assert {name: row["status"] for name, row in rows(tmp_path).items()} == {
            "seed=1": "finished",
            "seed=2": "running",
        }


def test_a_failed_job_is_said_passed_on_and_noted_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="optim.lr=-1"), SweepTable(tmp_path).job(["optim.lr=-1"]):
        raise UserError("optim.lr=-1: more than 0\nand more")
    row = rows(tmp_path)["optim.lr=-1"]
    assert row["status"] == "failed" and row["error"] == "optim.lr=-1: more than 0" and row["val/loss"] == ""
    assert "job failed: optim.lr=-1: optim.lr=-1: more than 0\n" in capsys.readouterr().out


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143), RuntimeError()])
def test_whatever_ends_a_job_its_row_does_not_stay_running(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)), SweepTable(tmp_path).job(["seed=1"]):
        raise error
    assert rows(tmp_path)["seed=1"]["status"] == "failed" and rows(tmp_path)["seed=1"]["error"]


def test_the_same_sweep_again_updates_its_rows_and_keeps_the_others(tmp_path: Path) -> None:
    finish(tmp_path, ["seed=1"], 3.0)
    with pytest.raises(RuntimeError), SweepTable(tmp_path).job(["seed=2"]):
        raise RuntimeError("no luck")
    finish(tmp_path, ["seed=2"], 2.0)
    table = rows(tmp_path)
    assert list(table) == ["seed=1", "seed=2"]
    assert [row["status"] for row in table.values()] == ["finished", "finished"]
    assert table["seed=2"]["val/loss"] == "2.0" and table["seed=2"]["error"] == ""


def test_overrides_may_hold_commas_and_quotes(tmp_path: Path) -> None:
    finish(tmp_path, ["optim.betas=[0.9,0.95]", 'prompt="a, b"'], 1.0)
    assert list(rows(tmp_path)) == ['optim.betas=[0.9,0.95] prompt="a, b"']
