"""Optimizers and learning-rate schedules."""

import math
from dataclasses import dataclass, field

import torch

from reprise.runtime import UserError, check_one_of
from reprise.training.budget import Landing


@dataclass
class OptimConfig:
    """AdamW (Loshchilov and Hutter 2019) or SGD with momentum."""

    kind: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.0
    betas: list[float] = field(default_factory=lambda: [0.9, 0.99])
    eps: float = 1e-8
    momentum: float = 0.0

    def __post_init__(self) -> None:
        check_one_of("optim.kind", self.kind, allowed=("adamw", "sgd"))
        if not 0 < self.lr < math.inf:
            raise UserError(f"optim.lr={self.lr}: more than 0, and finite")
        for key in ("weight_decay", "eps", "momentum"):
            if not 0 <= getattr(self, key) < math.inf:
                raise UserError(f"optim.{key}={getattr(self, key)}: at least 0, and finite")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"optim.betas={self.betas}: two numbers in [0, 1)")

    def build(self, model: torch.nn.Module, *, fused: bool) -> torch.optim.Optimizer:
        """Optimizer over `model`'s parameters; only matrices decay, never norms, biases or other vectors.

        Args:
            model: its parameters are taken in name order, so that optimizer state means the same in every process.
            fused: one kernel for all parameters; not with a gradient scaler, where clipping comes between.
        """
        named = sorted(model.named_parameters())
        matrices = [parameter for _, parameter in named if parameter.dim() >= 2]
        vectors = [parameter for _, parameter in named if parameter.dim() < 2]
        groups = [{"params": matrices, "weight_decay": self.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        groups = [group for group in groups if group["params"]]
        if self.kind == "sgd":
            return torch.optim.SGD(groups, lr=self.lr, momentum=self.momentum, fused=fused)
        beta1, beta2 = self.betas
        return torch.optim.AdamW(groups, lr=self.lr, betas=(beta1, beta2), eps=self.eps, fused=fused)


@dataclass
class ScheduleConfig:
    """Linear warm-up, then cosine, warmup-stable-decay (`wsd`: flat, then a straight line down), or constant."""

    kind: str = "cosine"
    warmup_steps: int = 100
    final_lr_fraction: float = 0.1
    decay_fraction: float = 0.3

    def __post_init__(self) -> None:
        check_one_of("schedule.kind", self.kind, allowed=("cosine", "wsd", "constant"))
        if self.warmup_steps < 0:
            raise UserError(f"schedule.warmup_steps={self.warmup_steps}: at least 0")
        if not 0 <= self.final_lr_fraction <= 1:
            raise UserError(f"schedule.final_lr_fraction={self.final_lr_fraction}: from 0 to 1")
        if not 0 < self.decay_fraction <= 1:
            raise UserError(f"schedule.decay_fraction={self.decay_fraction}: more than 0, at most 1")

    def warmup(self, planned_steps: int | None) -> int:
        """Warm-up steps really taken: a run of a few steps warms up for a fifth of them at most."""
        return self.warmup_steps if planned_steps is None else min(self.warmup_steps, planned_steps // 5)

    def factor(self, step: int, planned_steps: int | None, landing: Landing | None = None) -> float:
        """Share of the peak learning rate at optimizer update `step` (from 0): a pure function of its arguments.

        Args:
            step: updates completed; a step skipped for an overflow does not count.
            planned_steps: where the run is to end; None when only wall time limits it (then flat until the landing).
            landing: an early end planned by the clock, which overrides the rest of the schedule.
        """
        if landing is not None and step >= landing.start_step:
            share = min(1.0, (step - landing.start_step) / (landing.end_step - landing.start_step))
            start = self.factor(landing.start_step, planned_steps)
            return start + (min(start, self.final_lr_fraction) - start) * share
        warmup_steps = self.warmup(planned_steps)
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        if planned_steps is None or self.kind == "constant":
            return 1.0
        if self.kind == "wsd":
            decay_steps = max(1, round(self.decay_fraction * planned_steps))
            share = min(1.0, max(0.0, (step - (planned_steps - decay_steps)) / decay_steps))
            return 1.0 + (self.final_lr_fraction - 1.0) * share
        share = min(1.0, (step - warmup_steps) / max(1, planned_steps - warmup_steps))
        return self.final_lr_fraction + (1 - self.final_lr_fraction) * 0.5 * (1 + math.cos(math.pi * share))
