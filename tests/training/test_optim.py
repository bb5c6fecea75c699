"""The learning rate at every step, what decays, and steps that a gradient scaler skips."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from reprise.models import LanguageModel
from reprise.runtime import UserError, World
from reprise.training.budget import Budget, Landing
from reprise.training.callbacks.gradients import MAX_SKIPPED_IN_A_ROW, GradientMonitor
from reprise.training.callbacks.throughput import StepMetrics
from reprise.training.language_module import LanguageModule
from reprise.training.optim import OptimConfig, ScheduleConfig


def test_warm_up_is_a_straight_line_that_starts_above_zero() -> None:
    schedule = ScheduleConfig("cosine", warmup_steps=4, final_lr_fraction=0.1)
    assert [schedule.factor(step, 100) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_a_short_run_warms_up_for_a_fifth_of_it() -> None:
    schedule = ScheduleConfig("cosine", warmup_steps=100)
    assert schedule.warmup(20) == 4
    assert schedule.factor(3, 20) == 1.0
    assert schedule.warmup(4) == 0 and schedule.factor(0, 4) == 1.0
    assert schedule.warmup(None) == 100


def test_cosine_passes_the_middle_and_ends_at_its_fraction() -> None:
    schedule = ScheduleConfig("cosine", warmup_steps=20, final_lr_fraction=0.1)
    assert schedule.factor(60, 100) == pytest.approx(0.55)
    assert schedule.factor(40, 100) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert schedule.factor(100, 100) == pytest.approx(0.1)
    assert schedule.factor(500, 100) == pytest.approx(0.1)


def test_wsd_is_flat_and_then_a_straight_line() -> None:
    schedule = ScheduleConfig("wsd", warmup_steps=10, final_lr_fraction=0.2, decay_fraction=0.4)
    assert {schedule.factor(step, 100) for step in range(10, 61)} == {1.0}
    assert schedule.factor(80, 100) == pytest.approx(0.6)
    assert schedule.factor(100, 100) == pytest.approx(0.2)


def test_constant_stays_and_so_does_any_schedule_without_an_end() -> None:
    assert ScheduleConfig("constant", warmup_steps=2).factor(99, 100) == 1.0
    for kind in ("cosine", "wsd", "constant"):
        assert ScheduleConfig(kind, warmup_steps=2).factor(10**6, None) == 1.0


@pytest.mark.parametrize("kind", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize("start", [3, 40, 90])
def test_a_landing_takes_over_where_the_schedule_is(kind: str, start: int) -> None:
    schedule = ScheduleConfig(kind, warmup_steps=10, final_lr_fraction=0.05)
    landing = Landing(start, start + 10)
    assert schedule.factor(start - 1, 100, landing) == schedule.factor(start - 1, 100)
    assert schedule.factor(start, 100, landing) == schedule.factor(start, 100)
    middle = (schedule.factor(start, 100) + min(schedule.factor(start, 100), 0.05)) / 2
    assert schedule.factor(start + 5, 100, landing) == pytest.approx(middle)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_only_matrices_decay(kind: str, make_model: Callable[..., LanguageModel]) -> None:
    model = make_model(50)
    optimizer = OptimConfig(kind, lr=0.1, weight_decay=0.3).build(model, fused=False)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(decay) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        assert decay[id(parameter)] == (0.3 if parameter.dim() >= 2 else 0.0), name
    assert {"embedding.weight", "layers.0.recurrent_weight"} <= dict(model.named_parameters()).keys()


def test_optimizer_takes_parameters_in_name_order(make_model: Callable[..., LanguageModel]) -> None:
    model = make_model(50)
    optimizer = OptimConfig().build(model, fused=False)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        in_group = [names[id(parameter)] for parameter in group["params"]]
        assert in_group == sorted(in_group)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kind": "lion"}, "optim.kind=lion: one of adamw, sgd"),
        ({"lr": 0.0}, "optim.lr=0.0: more than 0"),
        ({"lr": math.nan}, "optim.lr=nan: more than 0"),
        ({"lr": math.inf}, "optim.lr=inf: more than 0"),
        ({"weight_decay": -0.1}, "optim.weight_decay=-0.1: at least 0"),
        ({"eps": -1e-8}, "optim.eps=-1e-08: at least 0"),
        ({"momentum": math.nan}, "optim.momentum=nan: at least 0"),
        ({"betas": [0.9]}, r"optim.betas=\[0.9\]: two numbers"),
        ({"betas": [0.9, 1.0]}, r"optim.betas=\[0.9, 1.0\]: two numbers"),
    ],
)
def test_optim_refuses_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        OptimConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kind": "step"}, "schedule.kind=step: one of cosine, wsd, constant"),
        ({"warmup_steps": -1}, "schedule.warmup_steps=-1: at least 0"),
        ({"final_lr_fraction": 1.5}, "schedule.final_lr_fraction=1.5: from 0 to 1"),
        ({"decay_fraction": 0.0}, "schedule.decay_fraction=0.0: more than 0"),
    ],
)
def test_schedule_refuses_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        ScheduleConfig(**fields)


class Scaler:
    """A gradient scaler as far as the monitor looks: its scale."""

    def __init__(self) -> None:
        self.scale = 1024.0

    def get_scale(self) -> float:
        return self.scale


class FakeTrainer(SimpleNamespace):
    """What the module and the gradient monitor ask of a trainer."""

    def __init__(self) -> None:
        self.scaler = Scaler()
        super().__init__(global_step=0, accumulate_grad_batches=1, precision_plugin=SimpleNamespace(scaler=self.scaler))

    def take_step(self, module: LanguageModule, monitor: GradientMonitor, optimizer: Any, *, overflow: bool) -> float:
        """One optimizer step as Lightning drives it; the learning rate it was taken with."""
        monitor.on_before_optimizer_step(self, module, optimizer)  # type: ignore[arg-type]
        module.on_before_optimizer_step(optimizer)
        self.scaler.scale *= 0.5 if overflow else 1.0
        self.global_step += 1
        monitor.on_train_batch_end(self, module, None, None, self.global_step - 1)  # type: ignore[arg-type]
        return float(optimizer.param_groups[0]["lr"])


@pytest.fixture
def module(make_model: Callable[..., LanguageModel]) -> LanguageModule:
    return LanguageModule(
        make_model(50),
        optim=OptimConfig("sgd", lr=0.5),
        schedule=ScheduleConfig("cosine", warmup_steps=5, final_lr_fraction=0.0),
        budget=Budget(40, None),
        world=World(),
        lanes=range(2),
        accumulate=1,
        seed=1,
        identity={},
    )


def test_a_skipped_step_does_not_advance_the_learning_rate(module: LanguageModule) -> None:
    trainer, monitor = FakeTrainer(), GradientMonitor(StepMetrics(100))
    module._trainer = trainer
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    overflows = [False, True, True, False, False, True, False]
    rates = [trainer.take_step(module, monitor, optimizer, overflow=overflow) for overflow in overflows]
    assert rates == pytest.approx([0.1, 0.2, 0.2, 0.2, 0.3, 0.4, 0.4])
    assert module.skipped_steps == 3
    assert monitor.metrics.values["optim/skipped_steps"] == 3.0
    assert monitor.metrics.values["optim/loss_scale"] == 128.0


def test_a_run_that_only_overflows_ends_with_one_clear_line(module: LanguageModule) -> None:
    trainer, monitor = FakeTrainer(), GradientMonitor(StepMetrics(1000))
    module._trainer = trainer
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    for _ in range(MAX_SKIPPED_IN_A_ROW - 1):
        trainer.take_step(module, monitor, optimizer, overflow=True)
    trainer.take_step(module, monitor, optimizer, overflow=False)
    for _ in range(MAX_SKIPPED_IN_A_ROW - 1):
        trainer.take_step(module, monitor, optimizer, overflow=True)
    with pytest.raises(UserError, match="cluster.precision=16-mixed: 40 steps in a row overflowed"):
        trainer.take_step(module, monitor, optimizer, overflow=True)
