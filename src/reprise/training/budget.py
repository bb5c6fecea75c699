"""How long a run trains: by steps, by tokens, by wall time, whichever ends first."""

import time
from dataclasses import dataclass
from typing import Any, Optional

from reprise.runtime import UserError

# Share of the wall-clock budget after which the speed is known well enough to plan the end from it.
PLANNING_SHARE = 0.6
# Steps slow down when a neighbour wakes up; the landing keeps this share of the time left as slack.
LANDING_SLACK = 0.06


@dataclass
class TrainConfig:
    """Length and pace of training. Of the three limits at least one is set; the first one reached ends the run.

    accumulate: groups of lanes a step takes one after the other. clip_norm: largest L2 norm of the gradient; null: any.
    """

    max_steps: Optional[int] = None
    max_tokens: Optional[int] = None
    max_minutes: Optional[float] = None
    accumulate: int = 1
    clip_norm: Optional[float] = 1.0
    log_every_steps: int = 20
    validate_every_steps: Optional[int] = None
    num_threads: Optional[int] = None
    # Share of every target's weight that goes to all words alike, and the weight of (log sum exp of the logits)^2.
    # What they add is part of train/loss; val/loss and test/loss are always the plain one.
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        for key in (
            "max_steps",
            "max_tokens",
            "max_minutes",
            "accumulate",
            "clip_norm",
            "log_every_steps",
            "validate_every_steps",
            "num_threads",
        ):
            value = getattr(self, key)
            if value is not None and value <= 0:
                raise UserError(f"train.{key}={value}: more than 0")
        if not 0.0 <= self.label_smoothing < 1.0:
            raise UserError(f"train.label_smoothing={self.label_smoothing}: allowed: 0 up to but not including 1")
        if self.z_loss < 0.0:
            raise UserError(f"train.z_loss={self.z_loss}: at least 0")

    def planned_steps(self, tokens_per_step: int) -> int | None:
        """Optimizer steps asked for, from max_steps and max_tokens; None when only wall time limits the run."""
        limits = [] if self.max_steps is None else [self.max_steps]
        if self.max_tokens is not None:
            limits.append(max(1, self.max_tokens // tokens_per_step))
        return min(limits, default=None)


@dataclass
class Landing:
    """From `start_step` the learning rate falls in a straight line to its final value at `end_step`."""

    start_step: int
    end_step: int


class Budget:
    """Decides when training ends.

    A run whose steps fit into `max_minutes` ends at its planned step and never looks at the clock. One that would run
    out of time plans its end from the speed seen so far, once, and anneals until there: a run on a slow machine ends
    with a low learning rate too. That plan is state, so a resumed run keeps it.
    """

    def __init__(self, planned_steps: int | None, max_minutes: float | None) -> None:
        self.planned_steps = planned_steps
        self.max_seconds = None if max_minutes is None else max_minutes * 60
        self.landing: Landing | None = None
        self._seconds_before = 0.0
        self._started_at: float | None = None

    def start_clock(self) -> None:
        """Count training time from now on, on top of what a resumed run had used."""
        self._started_at = time.monotonic()

    def stop_clock(self) -> None:
        """Count no training time from now on."""
        self._seconds_before = self.elapsed_s()
        self._started_at = None

    def elapsed_s(self) -> float:
        """Seconds of training so far, those before a resume included."""
        since_start = 0.0 if self._started_at is None else time.monotonic() - self._started_at
        return self._seconds_before + since_start

    @property
    def last_step(self) -> int | None:
        """The step that ends the run, when it is known."""
        return self.planned_steps if self.landing is None else self.landing.end_step

    def is_over(self, step: int, elapsed_s: float) -> bool:
        """Whether training ends after `step` optimizer steps and `elapsed_s` seconds."""
        if self.last_step is not None and step >= self.last_step:
            return True
        return self.max_seconds is not None and elapsed_s >= self.max_seconds

    def plan_landing(self, step: int, elapsed_s: float) -> Landing | None:
        """Plan the end when time will run out first; returns the plan in the one call that makes it.

        Args:
            step: optimizer steps done.
            elapsed_s: training seconds so far, those before a resume included.
        """
        if (
            self.max_seconds is None
            or self.landing is not None
            or elapsed_s < PLANNING_SHARE * self.max_seconds
            or step == 0
        ):
            return None
        steps_left = int((self.max_seconds - elapsed_s) * (1 - LANDING_SLACK) * step / elapsed_s)
        if self.planned_steps is not None and step + steps_left >= self.planned_steps:
            return None
        self.landing = Landing(step, step + max(1, steps_left))
        return self.landing

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run goes on from: plain data."""
        landing = None if self.landing is None else [self.landing.start_step, self.landing.end_step]
        return {"landing": landing, "seconds": self.elapsed_s()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.landing = None if state["landing"] is None else Landing(*state["landing"])
        self._seconds_before = state["seconds"]
