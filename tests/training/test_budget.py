"""When a run ends: by its steps without a look at the clock, or by a landing that is planned once and kept."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reprise.runtime import UserError
from reprise.training import budget as budgets
from reprise.training.budget import Budget, Landing, TrainConfig
from reprise.training.optim import ScheduleConfig


def test_without_minutes_no_clock_ends_or_lands_a_run() -> None:
    budget = Budget(20, None)
    for step in range(20):
        assert not budget.is_over(step, elapsed_s=1e9)
        assert budget.plan_landing(step, elapsed_s=1e9) is None
    assert budget.is_over(20, elapsed_s=0.0)
    assert budget.last_step == 20


def test_steps_that_fit_are_all_taken_and_nothing_is_planned() -> None:
    budget = Budget(1000, max_minutes=1)
    for step in range(1, 1000):
        elapsed_s = step * 0.05
        assert not budget.is_over(step, elapsed_s)
        assert budget.plan_landing(step, elapsed_s) is None
    assert budget.is_over(1000, 50.0)
    assert budget.landing is None and budget.last_step == 1000


def test_a_run_too_slow_for_its_minutes_plans_its_end_once() -> None:
    budget = Budget(1000, max_minutes=1)
    plans = []
    for step in range(1, 600):
        elapsed_s = step * 0.1
        if budget.is_over(step, elapsed_s):
            break
        plan = budget.plan_landing(step, elapsed_s)
        plans += [plan] if plan is not None else []
    assert len(plans) == 1
    assert plans[0].start_step == 360
    assert 360 < plans[0].end_step < 600
    assert step == plans[0].end_step == budget.last_step


def test_without_steps_the_clock_alone_ends_a_run_and_lands_it() -> None:
    budget = Budget(None, max_minutes=1)
    assert budget.last_step is None
    assert not budget.is_over(10**6, 59.9) and budget.is_over(1, 60.0)
    assert budget.plan_landing(100, 10.0) is None
    plan = budget.plan_landing(100, 40.0)
    assert plan is not None and 100 < plan.end_step <= 150


def test_a_resumed_run_keeps_the_plan_and_the_time_already_used() -> None:
    first = Budget(1000, max_minutes=1)
    plan = first.plan_landing(400, 40.0)
    assert plan is not None
    second = Budget(1000, max_minutes=1)
    second.load_state_dict(first.state_dict() | {"seconds": 40.0})
    assert second.landing == plan
    assert second.elapsed_s() == 40.0
    assert second.plan_landing(450, 41.0) is None
    assert second.landing == plan


def test_the_clock_counts_only_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(budgets.time, "monotonic", lambda: now)
    budget = Budget(None, max_minutes=1)
    budget.load_state_dict({"landing": None, "seconds": 5.0})
    now = 200.0
    assert budget.elapsed_s() == 5.0
    budget.start_clock()
    now = 203.0
    assert budget.elapsed_s() == 8.0
    assert budget.state_dict() == {"landing": None, "seconds": 8.0}
    budget.stop_clock()
    now = 900.0
    assert budget.elapsed_s() == 8.0


@given(
    kind=st.sampled_from(["cosine", "wsd", "constant"]),
    warmup_steps=st.integers(0, 300),
    final=st.floats(0, 1),
    planned_steps=st.none() | st.integers(1, 2000),
    start=st.integers(1, 1500),
    length=st.integers(1, 500),
)
def test_after_the_landing_begins_the_rate_only_falls_and_arrives(
    kind: str, warmup_steps: int, final: float, planned_steps: int | None, start: int, length: int
) -> None:
    schedule = ScheduleConfig(kind, warmup_steps=warmup_steps, final_lr_fraction=final)
    landing = Landing(start, start + length)
    factors = [schedule.factor(step, planned_steps, landing) for step in range(start, start + length + 3)]
    assert factors[0] == schedule.factor(start, planned_steps)
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(factors))
    assert factors[length] == pytest.approx(min(factors[0], final))
    assert factors[-1] == factors[length]


@given(step=st.integers(1, 10**6), elapsed_s=st.floats(36.0, 59.9), planned=st.none() | st.integers(1, 2 * 10**6))
def test_a_landing_lies_ahead_and_before_the_planned_end(step: int, elapsed_s: float, planned: int | None) -> None:
    budget = Budget(planned, max_minutes=1)
    plan = budget.plan_landing(step, elapsed_s)
    if plan is not None:
        assert plan.start_step == step < plan.end_step
        assert planned is None or plan.end_step <= max(planned, step + 1)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_steps": 0}, "train.max_steps=0: more than 0"),
        ({"max_minutes": -1.0}, "train.max_minutes=-1.0: more than 0"),
        ({"clip_norm": 0.0}, "train.clip_norm=0.0: more than 0"),
        ({"log_every_steps": 0}, "train.log_every_steps=0: more than 0"),
    ],
)
def test_refuses_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        TrainConfig(**fields)
