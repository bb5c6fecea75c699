"""Curves of finished or running runs, as pictures and as the numbers behind them."""

import csv
import glob
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reprise.runtime import RunFolder, UserError

# What a report shows: file name, metric, axis label, whether the axis is logarithmic.
FIGURES = (
    ("loss", ("train/loss", "val/loss"), "loss (nats a token)", False),
    ("perplexity", ("train/ppl", "val/ppl"), "perplexity", True),
    ("bits_per_byte", ("val/bpb",), "bits a byte (validation)", False),
    ("speed", ("perf/tokens_per_s",), "tokens a second", False),
)


@dataclass(frozen=True)
class RunCurves:
    """One run: its label, its folder, its rows in the order they were written."""

    label: str
    path: Path
    rows: list[dict[str, float]]

    def curve(self, metric: str) -> tuple[list[float], list[float]]:
        """The metric over tokens predicted: two lists of the same length, empty where the run has none of it."""
        points = [(row["progress/tokens"], row[metric]) for row in self.rows if metric in row]
        return [x for x, _ in points], [y for _, y in points]

    def result(self) -> dict[str, Any]:
        """The run's `result.json`, empty while it is not finished."""
        return RunFolder(self.path).result() or {}


def read_curves(metrics_file: Path) -> list[dict[str, float]]:
    """Rows of a `metrics.csv`, empty cells left out; a last row torn by a kill is passed over."""
    text = metrics_file.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    return [{name: float(cell) for name, cell in row.items() if cell} for row in csv.DictReader(whole.splitlines())]


def find_runs(pattern: str) -> list[RunCurves]:
    """Every run at or below the paths that match `pattern`.

    Raises:
        UserError: no run there.
    """
    files = {file for match in glob.glob(pattern) for file in Path(match).rglob("metrics.csv")}
    if not files:
        raise UserError(
            f"runs={pattern}: no run there (looked for metrics.csv); quote the pattern, as in runs='runs/*'"
        )
    return [RunCurves(_label(file.parent), file.parent, read_curves(file)) for file in sorted(files)]


def headline(result: dict[str, Any]) -> str:
    """The scores of a result in one line."""
    scores = [name for name in ("val/loss", "val/ppl", "test/bpb", "test/ppl", "test/ppl_word") if name in result]
    return ", ".join(f"{name} {result[name]:.4f}" for name in scores)


def write_report(pattern: str, folder: Path) -> list[Path]:
    """Draw every figure and write the numbers behind them.

    Args:
        pattern: glob of run folders, or of folders that hold them.
        folder: where the files go.

    Returns:
        The files: `<figure>.png`, `curves.csv` (one line a point) and `results.csv` (one line a run).
    """
    runs = find_runs(pattern)
    folder.mkdir(parents=True, exist_ok=True)
    files = [_write_curves(runs, folder / "curves.csv"), _write_results(runs, folder / "results.csv")]
    for name, metrics, label, logarithmic in FIGURES:
        if any(run.curve(metric)[0] for run in runs for metric in metrics):
            figure = draw(runs, metrics, label=label, logarithmic=logarithmic)
            figure.savefig(folder / f"{name}.png", dpi=150)
            files.append(folder / f"{name}.png")
    return files


def draw(runs: Sequence[RunCurves], metrics: Sequence[str], *, label: str, logarithmic: bool = False) -> Any:
    """A matplotlib figure of metrics over tokens, one colour a run; the first metric thin, the others with markers."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for index, run in enumerate(runs):
        for metric in metrics:
            tokens, values = run.curve(metric)
            if not tokens:
                continue
            is_sparse = metric.startswith(("val/", "test/"))
            axes.plot(
                [count / 1e6 for count in tokens],
                values,
                color=f"C{index % 10}",
                linewidth=1.5 if is_sparse else 0.8,
                marker="o" if is_sparse else None,
                markersize=4,
                label=f"{run.label} {metric}",
            )
    axes.set_xlabel("tokens (millions)")
    axes.set_ylabel(label)
    if logarithmic:
        axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return figure


def _label(folder: Path) -> str:
    """The name and the start of the digest, and what the command set, if that is short."""
    overrides = folder / "overrides.txt"
    words = overrides.read_text(encoding="utf-8").split() if overrides.exists() else []
    told = " ".join(word for word in words if not word.startswith(("name=", "paths.", "task=")))
    return f"{folder.parent.name}/{folder.name[:6]}" + (f" {told}" if 0 < len(told) <= 48 else "")


def _write_curves(runs: Sequence[RunCurves], path: Path) -> Path:
    metrics = sorted({metric for _, figure_metrics, _, _ in FIGURES for metric in figure_metrics})
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("run", "metric", "progress/tokens", "value"))
        for run in runs:
            for metric in metrics:
                writer.writerows((run.path, metric, x, y) for x, y in zip(*run.curve(metric), strict=True))
    return path


def _write_results(runs: Sequence[RunCurves], path: Path) -> Path:
    results = {run.path: run.result() for run in runs}
    names = sorted({name for result in results.values() for name in result if "/" in name or name == "parameters"})
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("run", "overrides", *names))
        for run in runs:
            result = results[run.path]
            writer.writerow(
                (run.path, run.label, *(json.dumps(result[name]) if name in result else "" for name in names))
            )
    return path
