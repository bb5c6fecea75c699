"""A run small enough to drill with, and what a run leaves behind."""

import csv
import json
from pathlib import Path
from typing import Any

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
