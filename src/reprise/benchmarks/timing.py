"""Times of competitors that take turns in one process, and the ratios that may be made of them.

Every side runs once a repetition, and each repetition begins with another side, so that what the machine does meanwhile
(its clock, its neighbours, its caches) hits all of them alike. A ratio is taken within each repetition; its median and
its quartiles over the repetitions are what is told.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Side:
    """A competitor.

    `run` does the work once; where `has_own_clock`, it hands back the seconds that count. `tokens` is what one call
    works through, 0 where that means nothing. `facts` go into the record.
    """

    name: str
    run: Callable[[], Any]
    tokens: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    has_own_clock: bool = False


@dataclass(frozen=True)
class Pace:
    """How often: timed repetitions, calls before them that do not count, and the least seconds of a repetition."""

    repetitions: int
    warmup: int
    min_repetition_s: float


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Of two values or more."""
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)

    def plain(self) -> dict[str, float]:
        """As `result.json` has it."""
        return {"median": self.median, "low": self.low, "high": self.high}


@dataclass(frozen=True)
class Timing:
    """Seconds of one call of a side, a number for every repetition, each the mean over `num_calls` calls."""

    side: Side
    num_calls: int
    seconds: tuple[float, ...]

    @property
    def spread(self) -> Spread:
        """Median and quartiles of the seconds."""
        return Spread.of(self.seconds)

    def record(self, case: str) -> dict[str, Any]:
        """What `result.json` keeps of it; `case` says where the side was measured."""
        spread = self.spread
        record: dict[str, Any] = {"case": case, "side": self.side.name, **self.side.facts}
        if self.side.tokens:
            record |= {"tokens": self.side.tokens, "tokens_per_s": self.side.tokens / spread.median}
        record |= {f"{name}_s": value for name, value in spread.plain().items()}
        return record | {"calls_per_repetition": self.num_calls, "seconds": list(self.seconds)}


Timings = dict[str, Timing]


def interleave(
    sides: Sequence[Side],
    pace: Pace,
    *,
    synchronise: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Timings:
    """Time all sides in turn.

    Args:
        sides: their names differ.
        pace: how often.
        synchronise: waits for work that a call has only queued (a GPU's).
        clock: seconds.
    """
    assert len({side.name for side in sides}) == len(sides), "a side is known by its name"
    num_calls = {side.name: _warm_up(side, pace, synchronise, clock) for side in sides}
    seconds: dict[str, list[float]] = {side.name: [] for side in sides}
    with _no_garbage_collection():
        for repetition in range(pace.repetitions):
            first = repetition % len(sides)
            for side in (*sides[first:], *sides[:first]):
                seconds[side.name].append(_seconds_a_call(side, num_calls[side.name], synchronise, clock))
    return {side.name: Timing(side, num_calls[side.name], tuple(seconds[side.name])) for side in sides}


def speed_ratio(over: Timing, under: Timing) -> Spread:
    """How many times as fast `over` is as `under`, in tokens a second where both count tokens, else in calls."""
    work = over.side.tokens / under.side.tokens if over.side.tokens and under.side.tokens else 1.0
    return work_ratio(over, under, work=work)


def work_ratio(over: Timing, under: Timing, *, work: float) -> Spread:
    """Work a second of `over` over that of `under`, where a call of `over` does `work` times as much."""
    return Spread.of([work * theirs / ours for ours, theirs in zip(over.seconds, under.seconds, strict=True)])


def time_ratio(over: Timing, under: Timing) -> Spread:
    """How many times as long `over` takes as `under`, a call each."""
    return Spread.of([ours / theirs for ours, theirs in zip(over.seconds, under.seconds, strict=True)])


def fastest(*timings: Timing) -> Timing:
    """The one with the shortest median."""
    return min(timings, key=lambda timing: timing.spread.median)


def _warm_up(side: Side, pace: Pace, synchronise: Callable[[], None], clock: Callable[[], float]) -> int:
    """Calls of the side in one repetition, from the time of its last warm-up call."""
    last_s = math.inf
    for _ in range(max(1, pace.warmup)):
        last_s = _seconds_a_call(side, 1, synchronise, clock)
    if side.has_own_clock or last_s >= pace.min_repetition_s:
        return 1
    return math.ceil(pace.min_repetition_s / max(last_s, 1e-6))


def _seconds_a_call(side: Side, num_calls: int, synchronise: Callable[[], None], clock: Callable[[], float]) -> float:
    if side.has_own_clock:
        return float(side.run())
    synchronise()
    started_s = clock()
    for _ in range(num_calls):
        side.run()
    synchronise()
    return (clock() - started_s) / num_calls


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A collection in the middle of one side's turn would be put down to it."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
