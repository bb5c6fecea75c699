"""Sides take turns, ratios are made within a repetition, and the statistics are right on numbers made up for it."""

import gc
from collections.abc import Callable

import pytest

from reprise.benchmarks.timing import Pace, Side, Spread, Timing, fastest, interleave, speed_ratio, time_ratio

# Nothing is repeated within a repetition.
ONCE = Pace(repetitions=9, warmup=1, min_repetition_s=0.0)


class FakeClock:
    """A clock that moves only when a side works."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.calls: list[str] = []

    def __call__(self) -> float:
        return self.now_s

    def side(self, name: str, *seconds: float, tokens: int = 0) -> Side:
        """A side whose calls take these times, again from the first after the last."""
        count = 0

        def work() -> None:
            nonlocal count
            self.now_s += seconds[count % len(seconds)]
            self.calls.append(name)
            count += 1

        return Side(name, work, tokens)


def timing(*seconds: float, tokens: int = 0) -> Timing:
    return Timing(Side("made_up", lambda: None, tokens), 1, seconds)


def test_median_and_quartiles() -> None:
    assert Spread.of([5.0, 1.0, 3.0, 2.0, 4.0]) == Spread(3.0, 2.0, 4.0)
    assert Spread.of([1.0, 2.0, 3.0, 4.0]) == Spread(2.5, 1.75, 3.25)
    # One repetition that a neighbour disturbed moves none of the three far.
    assert Spread.of([1.0] * 8 + [1000.0]) == Spread(1.0, 1.0, 1.0)


def test_sides_take_turns_and_each_repetition_begins_with_another() -> None:
    clock = FakeClock()
    sides = [clock.side("a", 1.0), clock.side("b", 2.0), clock.side("c", 3.0)]
    timings = interleave(sides, Pace(repetitions=4, warmup=2, min_repetition_s=0.0), clock=clock)
    assert clock.calls[:6] == ["a", "a", "b", "b", "c", "c"]
    assert "".join(clock.calls[6:]) == "abc" + "bca" + "cab" + "abc"
    assert {name: found.seconds for name, found in timings.items()} == {
        "a": (1.0,) * 4,
        "b": (2.0,) * 4,
        "c": (3.0,) * 4,
    }


def test_a_short_call_is_repeated_until_the_repetition_is_long_enough() -> None:
    clock = FakeClock()
    sides = [clock.side("short", 0.25), clock.side("long", 3.0)]
    timings = interleave(sides, Pace(repetitions=9, warmup=1, min_repetition_s=1.0), clock=clock)
    assert (timings["short"].num_calls, timings["long"].num_calls) == (4, 1)
    assert clock.calls.count("short") == 1 + 9 * 4
    assert timings["short"].seconds == (0.25,) * 9


def test_a_ratio_is_made_within_each_repetition() -> None:
    clock = FakeClock()
    # The machine gets ten times slower half way: both sides do, and no ratio notices. The first call warms up.
    slow = [10.0 if repetition >= 5 else 1.0 for repetition in range(9)]
    sides = [
        clock.side("ours", 1.0, *(1.0 * factor for factor in slow)),
        clock.side("theirs", 3.0, *(3.0 * factor for factor in slow)),
    ]
    timings = interleave(sides, ONCE, clock=clock)
    assert speed_ratio(timings["ours"], timings["theirs"]) == Spread(3.0, 3.0, 3.0)
    assert time_ratio(timings["ours"], timings["theirs"]).median == pytest.approx(1 / 3)


def test_speed_counts_tokens() -> None:
    ours, theirs = timing(2.0, 4.0, 8.0, tokens=100), timing(2.0, 2.0, 2.0, tokens=50)
    assert speed_ratio(ours, theirs) == Spread.of([2.0, 1.0, 0.5])
    assert time_ratio(ours, theirs) == Spread.of([1.0, 2.0, 4.0])


def test_the_fastest_is_so_by_its_median() -> None:
    steady, jumpy = timing(2.0, 2.0, 2.0), timing(1.0, 3.0, 3.0)
    assert fastest(jumpy, steady) is steady


def test_a_record_holds_every_repetition() -> None:
    clock = FakeClock()
    side = clock.side("a", *[float(number) for number in range(1, 10)], tokens=30)
    record = interleave([side], ONCE, clock=clock)["a"].record("here")
    # The first call, of one second, warmed up.
    assert sorted(record["seconds"]) == [float(number) for number in range(1, 10)]
    assert record["median_s"] == 5.0 and record["tokens_per_s"] == 6.0
    assert record["case"] == "here" and record["side"] == "a"


def test_a_side_with_a_clock_of_its_own_is_believed() -> None:
    clock = FakeClock()
    own = Side("loop", lambda: 7.0, tokens=14, has_own_clock=True)
    timings = interleave([own, clock.side("a", 1.0)], Pace(9, 1, min_repetition_s=100.0), clock=clock)
    assert timings["loop"].seconds == (7.0,) * 9 and timings["loop"].num_calls == 1


def test_no_garbage_is_collected_meanwhile(restore_collection: None) -> None:
    seen: list[bool] = []
    gc.enable()
    interleave([Side("a", lambda: seen.append(gc.isenabled()))], ONCE)
    assert seen == [True] + [False] * 9 and gc.isenabled()


def test_a_failing_side_leaves_collection_on(restore_collection: None) -> None:
    gc.enable()
    calls = iter([None, None])
    with pytest.raises(StopIteration):
        interleave([Side("a", calls.__next__)], ONCE)
    assert gc.isenabled()


@pytest.fixture
def restore_collection() -> Callable[[], None]:
    was_on = gc.isenabled()
    yield
    gc.enable() if was_on else gc.disable()


def test_a_queued_call_is_waited_for() -> None:
    clock = FakeClock()

    def synchronise() -> None:
        # What a call has queued takes effect when it is waited for.
        clock.now_s += 2.0 * len(queue)
        queue.clear()

    queue: list[int] = []
    timings = interleave([Side("gpu", lambda: queue.append(1))], ONCE, synchronise=synchronise, clock=clock)
    assert timings["gpu"].seconds == (2.0,) * 9
