"""What a benchmark found: records, ratios, and tables to read."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from reprise.benchmarks.timing import Spread, Timing, Timings


@dataclass
class Outcome:
    """Records (one a side and case), ratios by name, and what else was found out, all of it plain."""

    records: list[dict[str, Any]] = field(default_factory=list)
    ratios: dict[str, Spread] = field(default_factory=dict)
    findings: dict[str, Any] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)

    def add(self, case: str, timings: Timings) -> None:
        """Keep a record of every side that was timed in `case`."""
        self.records += [timing.record(case) for timing in timings.values()]

    def result(self) -> dict[str, Any]:
        """Its part of `result.json`."""
        ratios = {name: spread.plain() for name, spread in self.ratios.items()}
        return {"ratios": ratios, **self.findings, "records": self.records}


def rates_table(title: str, timings: Timings) -> Table:
    """Milliseconds a call and tokens a second of every side, and what ran."""
    table = _table(title, "side", "ran", "ms", "quartiles", "tokens/s")
    for timing in timings.values():
        spread = timing.spread
        table.add_row(
            timing.side.name,
            str(timing.side.facts.get("implementation", "")),
            f"{1000 * spread.median:.2f}",
            f"{1000 * spread.low:.2f} - {1000 * spread.high:.2f}",
            _rate(timing),
        )
    return table


def ratios_table(title: str, ratios: dict[str, Spread]) -> Table:
    """Median and quartiles of every ratio."""
    table = _table(title, "ratio", "median", "quartiles")
    for name, spread in ratios.items():
        table.add_row(name, f"{spread.median:.3f}", f"{spread.low:.3f} - {spread.high:.3f}")
    return table


def plain_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table of anything else: a heading for every column, and rows as long."""
    table = _table(title, *columns)
    for row in rows:
        table.add_row(*row)
    return table


def show(outcome: Outcome, machine: dict[str, Any], *, title: str) -> None:
    """Print every table, the machine first and the ratios last."""
    console = Console()
    # Where nobody looks at a terminal of some width, nothing needs to be cut to one.
    if not console.is_terminal:
        console = Console(width=140)
    features = " ".join(machine["processor_features"]) or "none of those that matter here"
    console.print(f"{title} on {machine['device']}: {machine['processor']}, {machine['threads']} threads; {features}")
    for table in outcome.tables:
        console.print(table)
    console.print(ratios_table(f"{title}: ratios", outcome.ratios))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 or column == "ran" else "right")
    return table


def _rate(timing: Timing) -> str:
    return f"{timing.side.tokens / timing.spread.median:,.0f}" if timing.side.tokens else ""
