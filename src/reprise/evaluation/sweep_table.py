"""One table of all jobs of a sweep, written again after every job, so that a killed sweep leaves one too."""

import csv
import io
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from reprise.runtime import say, write_atomically

# Results a reader compares; a job that has none of one leaves its cell empty.
COLUMNS = (
    "val/loss",
    "val/ppl",
    "val/bpb",
    "test/loss",
    "test/ppl",
    "test/bpb",
    "parameters",
    "perf/tokens_per_s",
    "seconds",
)


class SweepTable:
    """`results.csv` in a sweep's folder: a row a job with its overrides, status, run folder and results.

    Jobs are known by their overrides, so the same sweep given again updates its rows.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "results.csv"
        self._jobs_file = folder / ".jobs.json"
        self._jobs: dict[str, dict[str, Any]] = {}
        if self._jobs_file.exists():
            self._jobs = json.loads(self._jobs_file.read_text(encoding="utf-8"))

    @contextmanager
    def job(self, overrides: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Around one job: its row says "running", then "finished" with what it put into the record, or "failed".

        The record takes the job's result under its metric names, and its folder under "run".

        An exception is said at once and passed on; Hydra notes it and goes on to the next job.
        """
        name = " ".join(overrides)
        row: dict[str, Any] = {"overrides": name, "status": "running", "error": "", "run": ""}
        record: dict[str, Any] = {}
        self._write(name, row)
        try:
            yield record
        except BaseException as error:
            row |= {"status": "failed", "error": str(error).split("\n")[0] or type(error).__name__}
            say(f"job failed: {name}: {row['error']}")
            raise
        else:
            row["status"] = "finished"
        finally:
            row |= {column: record[column] for column in (*COLUMNS, "run") if column in record}
            self._write(name, row)
            statuses = [job["status"] for job in self._jobs.values()]
            say(f"sweep: {statuses.count('finished')} finished, {statuses.count('failed')} failed; {self.path}")

    def _write(self, name: str, row: dict[str, Any]) -> None:
        self._jobs[name] = row
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._jobs_file, json.dumps(self._jobs, indent=1))
        text = io.StringIO()
        writer = csv.DictWriter(text, ("overrides", "status", *COLUMNS, "error", "run"), lineterminator="\n")
        writer.writeheader()
        writer.writerows(self._jobs.values())
        write_atomically(self.path, text.getvalue())
