"""Whole runs as a user starts them: `python run.py ...` in processes of their own, and what they leave behind."""

import csv
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

# Fifty steps in about a second, with dropout, and with checkpoints on the borders of log steps.
SMALL = (
    "debug=smoke",
    "train.max_steps=50",
    "train.log_every_steps=2",
    "train.validate_every_steps=10",
    "checkpoint.every_steps=10",
    "checkpoint.every_minutes=null",
    "model.dropout=0.2",
    "model.embedding_dropout=0.1",
    "cluster.precision=32-true",
    "generate.num_tokens=20",
    "prompt='The value of'",
)
LOSSES = ("train/loss", "val/loss", "test/loss")
# Nothing of the machine's own may reach a run: neither ranks nor a tracker's key.
_NOT_PASSED_ON = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WANDB_API_KEY", "WANDB_MODE")


@dataclass(frozen=True)
class Outcome:
    """How a process ended, and what it said on both its outputs."""

    exit_code: int
    output: str


def start(root: Path, *words: str, launcher: tuple[str, ...] = (), home: Path | None = None) -> "subprocess.Popen[str]":
    """Start `python [launcher] run.py <words>` with everything it writes under `root`, and its input closed."""
    environment = {name: value for name, value in os.environ.items() if name not in _NOT_PASSED_ON}
    environment |= {"OMP_NUM_THREADS": "1"} | ({} if home is None else {"HOME": str(home)})
    return subprocess.Popen(
        [sys.executable, *launcher, "run.py", *words, f"paths.root={root}"],
        cwd=REPOSITORY,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: "subprocess.Popen[str]") -> Outcome:
    """Wait for the process; one that hangs is killed and fails the test."""
    try:
        output, _ = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        pytest.fail(f"no end within 240 s; it said:\n{output}")
    return Outcome(process.returncode, output)


def run(root: Path, *words: str, **how: Any) -> Outcome:
    return finish(start(root, *words, **how))


def succeed(*processes: "subprocess.Popen[str]") -> list[Outcome]:
    """Wait for all; each must end well."""
    outcomes = [finish(process) for process in processes]
    for outcome in outcomes:
        assert outcome.exit_code == 0, outcome.output
    return outcomes


def folder_of(root: Path, name: str) -> Path:
    """The one run folder of that name."""
    folders = list((root / "runs" / name).iterdir())
    assert len(folders) == 1, folders
    return folders[0]


def result_of(root: Path, name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder_of(root, name) / "result.json").read_text())
    return result


def events_of(root: Path, name: str) -> list[str]:
    lines = (folder_of(root, name) / "events.jsonl").read_text().splitlines()
    return [json.loads(line)["event"] for line in lines]


def losses_of(root: Path, name: str) -> dict[tuple[str, int], float]:
    """Every loss in `metrics.csv` by its name and step; a row that is there twice fails."""
    losses: dict[tuple[str, int], float] = {}
    with open(folder_of(root, name) / "metrics.csv", newline="") as stream:
        for row in csv.DictReader(stream):
            for metric in LOSSES:
                if row[metric]:
                    key = (metric, int(row["progress/step"]))
                    assert key not in losses, f"{key} twice"
                    losses[key] = float(row[metric])
    return losses
