"""A sweep: one folder a job, one table of all, failing jobs stop nobody, and again does only what is missing."""

import csv
import random
from pathlib import Path

import pytest
from commands import run
from drill_runs import SMALL

TINY = (*SMALL, "train.max_steps=6", "train.validate_every_steps=null", "data.window=16")


def table_of(root: Path) -> list[dict[str, str]]:
    """The rows of the one table under `root`."""
    [file] = root.glob("sweeps/*/results.csv")
    with open(file, newline="") as stream:
        return list(csv.DictReader(stream))


def finished(root: Path) -> dict[Path, int]:
    """When each finished run's result was written."""
    return {file: file.stat().st_mtime_ns for file in root.glob("runs/*/*/result.json")}


def write_text(path: Path) -> None:
    generator = random.Random(1)
    words = ["".join(generator.choices("aeiourstlnmdk", k=generator.randint(2, 8))) for _ in range(400)]
    path.write_text("".join(" ".join(generator.choices(words, k=9)) + "\n" for _ in range(1500)))


def test_a_job_that_fails_is_the_only_one_done_again(tmp_path: Path) -> None:
    first, late = tmp_path / "first.txt", tmp_path / "late.txt"
    write_text(first)
    words = ("-m", *TINY, "data.vocab_size=300", f"data.source={late},{first}")
    outcome = run(tmp_path, *words)
    assert outcome.exit_code != 0
    assert "Traceback" not in outcome.output, outcome.output
    assert [row["status"] for row in table_of(tmp_path)] == ["failed", "finished"]
    assert f"data.source={late}: no such file" in outcome.output
    done = finished(tmp_path)
    assert len(done) == 1

    write_text(late)
    outcome = run(tmp_path, *words)
    assert outcome.exit_code == 0, outcome.output
    assert [row["status"] for row in table_of(tmp_path)] == ["finished", "finished"]
    assert all(row["val/loss"] and row["error"] == "" for row in table_of(tmp_path))
    assert len(finished(tmp_path)) == 2
    assert {file: finished(tmp_path)[file] for file in done} == done
    assert len(list(tmp_path.rglob("multirun.yaml"))) == 1


@pytest.mark.slow
def test_four_jobs_leave_four_folders_and_one_table(tmp_path: Path) -> None:
    words = ("-m", *TINY, "model/cell=lstm,gru", "optim.lr=1e-3,3e-3", "cluster.devices=2")
    outcome = run(tmp_path, *words)
    assert outcome.exit_code == 0, outcome.output
    table = table_of(tmp_path)
    assert len(table) == 4
    assert {row["status"] for row in table} == {"finished"}
    folders = {Path(row["run"]) for row in table}
    assert folders == {file.parent for file in finished(tmp_path)} and len(folders) == 4
    assert len({row["val/loss"] for row in table}) == 4
    assert len(list(tmp_path.rglob("multirun.yaml"))) == 1

    done = finished(tmp_path)
    again = run(tmp_path, *words)
    assert again.exit_code == 0 and again.output.count(" is finished ") == 4
    assert finished(tmp_path) == done
    assert len(table_of(tmp_path)) == 4
