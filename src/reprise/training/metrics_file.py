"""`metrics.csv`: always written, only ever appended to, each step once however often the run was killed."""

import csv
import importlib.util
import io
import math
import os
from dataclasses import dataclass
from pathlib import Path

from reprise.evaluation.report import read_curves
from reprise.runtime import UserError, check_one_of

# One name, one meaning, everywhere. A column that a run never fills stays empty, so that a resumed run can append.
COLUMNS = (
    "progress/step",
    "progress/tokens",
    "progress/epoch",
    "progress/hours",
    "train/loss",
    "train/ppl",
    "val/loss",
    "val/ppl",
    "val/bpb",
    "val/ppl_word",
    "test/loss",
    "test/ppl",
    "test/bpb",
    "test/ppl_word",
    "optim/lr",
    "optim/grad_norm",
    "optim/clip_frac",
    "optim/loss_scale",
    "optim/skipped_steps",
    "optim/update_ratio",
    "perf/tokens_per_s",
    "perf/step_ms",
    "perf/data_wait_pct",
    "perf/tflops",
    "mem/max_resident_gib",
    "mem/max_allocated_gib",
    "rnn/h_norm",
    "rnn/c_norm",
    "rnn/state_resets",
)


@dataclass
class LoggerConfig:
    """Trackers beside `metrics.csv`. Nothing leaves the machine unless `wandb_mode` is "online"."""

    tensorboard: bool = False
    wandb: bool = False
    wandb_mode: str = "offline"
    wandb_project: str = "reprise"

    def __post_init__(self) -> None:
        check_one_of("logger.wandb_mode", self.wandb_mode, allowed=("offline", "online", "disabled"))


def check_installed(settings: LoggerConfig) -> None:
    """Raise a UserError before any work when a tracker asked for is not installed."""
    if settings.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise UserError("logger=tensorboard: the package is absent; python -m pip install 'reprise-lm[tensorboard]'")


class MetricsFile:
    """Rows of one run. A row whose step was already written (before a kill, say) is left out: it would say the same."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._written: set[tuple[str, int]] = set()
        if path.exists():
            self._drop_torn_row()
            for row in read_curves(path):
                self._written.add((_kind(row), int(row["progress/step"])))
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._append(list(COLUMNS))

    def append(self, values: dict[str, float]) -> None:
        """Write one row; `progress/step` is required, unknown names are our own mistake."""
        unknown = values.keys() - set(COLUMNS)
        assert not unknown, f"not in COLUMNS: {sorted(unknown)}"
        key = (_kind(values), int(values["progress/step"]))
        if key in self._written:
            return
        self._written.add(key)
        self._append([_text(values[name]) if name in values else "" for name in COLUMNS])

    def _append(self, fields: list[str]) -> None:
        line = io.StringIO()
        csv.writer(line, lineterminator="\n").writerow(fields)
        with open(self.path, "a", encoding="utf-8", newline="") as file:
            file.write(line.getvalue())

    def _drop_torn_row(self) -> None:
        """Cut off what a kill in the middle of a write left after the last whole line."""
        with open(self.path, "r+b") as file:
            contents = file.read()
            whole = contents.rfind(b"\n") + 1
            if whole < len(contents):
                file.truncate(whole)
                os.fsync(file.fileno())
        if whole == 0:
            self._append(list(COLUMNS))


def _kind(values: dict[str, float]) -> str:
    for kind in ("train", "val", "test"):
        if f"{kind}/loss" in values:
            return kind
    return "other"


def _text(value: float) -> str:
    return (
        str(int(value)) if math.isfinite(value) and value == int(value) and abs(value) < 2**53 else repr(float(value))
    )
