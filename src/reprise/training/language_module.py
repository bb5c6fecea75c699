"""The training step of a recurrent language model under Lightning's automatic optimisation.

B this rank's lanes of one accumulation group, T window, D width.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as lightning
import torch
from torch import Tensor

from reprise.evaluation.language import Tally
from reprise.kernels.keyed_random import fold
from reprise.models import LanguageModel, ModelState
from reprise.runtime import World
from reprise.training import recovery_state
from reprise.training.budget import Budget
from reprise.training.datamodule import Batch
from reprise.training.optim import OptimConfig, ScheduleConfig


class LaneStates:
    """Hidden state of this rank's lanes: plain fp32 tensors, no buffer (DDP would overwrite it with rank 0's)."""

    def __init__(self, lanes: range, state: ModelState) -> None:
        self.lanes = lanes
        self._state = state

    def take(self, first_lane: int, num_lanes: int) -> ModelState:
        """State of `num_lanes` lanes from `first_lane` on."""
        rows = self._rows(first_lane, num_lanes)
        return tuple(tuple(tensor[rows] for tensor in layer) for layer in self._state)

    def put(self, first_lane: int, num_lanes: int, state: ModelState) -> None:
        """Keep what the window left, cut off from its gradient."""
        rows = self._rows(first_lane, num_lanes)
        with torch.no_grad():
            for kept_layer, layer in zip(self._state, state, strict=True):
                for kept, tensor in zip(kept_layer, layer, strict=True):
                    kept[rows] = tensor.detach()

    def norms(self) -> list[list[float]]:
        """Mean L2 norm over lanes of every state tensor [B, D], layer by layer: (h, c), (h,), or () for a cache."""
        return [[float(tensor.norm(dim=-1).mean()) for tensor in layer if tensor.dim() == 2] for layer in self._state]

    def _rows(self, first_lane: int, num_lanes: int) -> slice:
        start = first_lane - self.lanes.start
        assert start >= 0 and start + num_lanes <= len(self.lanes)
        return slice(start, start + num_lanes)


@dataclass
class LogWindow:
    """What this rank saw since the last log step. Part of a checkpoint: a resumed run logs what a straight one logs."""

    tally: Tally = field(default_factory=Tally)
    num_resets: int = 0
    num_clipped: Tensor = field(default_factory=lambda: torch.zeros(()))

    def state_dict(self) -> dict[str, Any]:
        """This rank's share as plain data; `joined` puts the shares together."""
        return {"tally": self.tally.sums, "num_resets": self.num_resets, "num_clipped": float(self.num_clipped)}

    @classmethod
    def joined(cls, ranks: Sequence[dict[str, Any]]) -> "LogWindow":
        """One window from those of several ranks: counts of lanes add up, every rank clips the same gradient."""
        if not ranks:
            return cls()
        tally = Tally(sum(rank["tally"] for rank in ranks))
        return cls(tally, sum(rank["num_resets"] for rank in ranks), torch.tensor(ranks[0]["num_clipped"]))


class LanguageModule(lightning.LightningModule):
    """Next-token training with carried state.

    Args:
        model: the language model.
        optim: optimizer settings.
        schedule: learning-rate settings.
        budget: when training ends, which the schedule needs to know.
        world: this rank.
        lanes: this rank's training lanes.
        accumulate: groups of lanes a step.
        seed: with step and lane it decides every dropout mask.
        identity: plain settings that a checkpoint must share with the run that loads it.
        corpus_name: the prepared text, by content, that lanes are positions in.
        label_smoothing: share of every target's weight that goes to all words alike; in training only.
        z_loss: weight of the squared log sum exp of the logits; in training only.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        optim: OptimConfig,
        schedule: ScheduleConfig,
        budget: Budget,
        world: World,
        lanes: range,
        accumulate: int,
        seed: int,
        identity: dict[str, Any],
        corpus_name: str = "",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> None:
        super().__init__()
        self.model = model
        self.optim = optim
        self.schedule = schedule
        self.budget = budget
        self.world = world
        self.lanes = lanes
        self.accumulate = accumulate
        self.seed = seed
        self.identity = identity
        self.corpus_name = corpus_name
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.skipped_steps = 0
        self.grad_norm = torch.zeros(())
        self.log_window = LogWindow()
        self.batch_started_s = 0.0
        self.eval_tally = Tally()
        self.eval_state: ModelState | None = None
        self.train_states: LaneStates | None = None
        self.loaded_states: list[list[Tensor]] | None = None

    def on_train_batch_start(self, batch: Batch, batch_index: int) -> None:
        # Lightning calls this after the callbacks' hooks, so saving a checkpoint is not counted as computing.
        self.batch_started_s = time.perf_counter()

    def training_step(self, batch: Batch, batch_index: int) -> Tensor:
        """Nats a token of this window, scaled so that means over ranks and groups give the loss of the whole step."""
        assert self.train_states is not None
        num_lanes = len(batch.tokens_BT)
        state = self.train_states.take(batch.first_lane, num_lanes)
        keys_B = self._dropout_keys(batch.step, batch.first_lane, num_lanes)
        hidden_BTD, state = self.model(batch.tokens_BT, state, batch.reset_BT, keys_B)
        self.train_states.put(batch.first_lane, num_lanes, state)
        loss_sum = self.model.loss_sum(
            hidden_BTD, batch.targets_BT, label_smoothing=self.label_smoothing, z_loss=self.z_loss
        )
        self.log_window.tally.add(loss_sum.detach(), batch.num_own_targets)
        self.log_window.num_resets += batch.num_resets
        # A step's loss is a sum over ranks and groups by the step's targets; DDP and Lightning take means over them.
        return loss_sum * (self.world.size * self.accumulate / batch.num_targets)

    def _dropout_keys(self, step: int, first_lane: int, num_lanes: int) -> Tensor:
        """A key a lane from (seed, step, lane), so that a mask is the same on whichever rank the lane is."""
        seed = torch.tensor([self.seed], device=self.device)
        return fold(fold(seed, step), torch.arange(first_lane, first_lane + num_lanes, device=self.device))

    def on_fit_start(self) -> None:
        state = self.model.initial_state(len(self.lanes), self.device)
        self.train_states = LaneStates(self.lanes, state)
        if self.loaded_states is not None:
            recovery_state.put_lane_states(self.train_states, self.loaded_states)
            self.loaded_states = None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Lightning refuses to clip for a fused optimizer under a gradient scaler.
        return self.optim.build(self.model, fused=self.trainer.precision != "16-mixed")

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        updates = self.trainer.global_step - self.skipped_steps
        factor = self.schedule.factor(updates, self.budget.planned_steps, self.budget.landing)
        for group in optimizer.param_groups:
            group["lr"] = self.optim.lr * factor

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip by the global L2 norm of the unscaled gradients and keep that norm, which Lightning throws away."""
        limit = float("inf") if gradient_clip_val is None else float(gradient_clip_val)
        self.grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        window = self.log_window
        window.num_clipped = window.num_clipped.to(self.grad_norm.device) + (self.grad_norm > limit)

    def on_validation_epoch_start(self) -> None:
        self._start_evaluation()

    def validation_step(self, batch: Batch, batch_index: int) -> None:
        self._evaluate(batch)

    def on_test_epoch_start(self) -> None:
        self._start_evaluation()

    def test_step(self, batch: Batch, batch_index: int) -> None:
        self._evaluate(batch)

    def _start_evaluation(self) -> None:
        """Evaluation has a state of its own that starts from zero, so that training goes on as if it had not been."""
        self.eval_tally = Tally()
        self.eval_state = None

    def _evaluate(self, batch: Batch) -> None:
        if self.eval_state is None:
            self.eval_state = self.model.initial_state(len(batch.tokens_BT), self.device)
        hidden_BTD, self.eval_state = self.model(batch.tokens_BT, self.eval_state, batch.reset_BT)
        nll_sum = self.model.loss_sum(hidden_BTD, batch.targets_BT)
        self.eval_tally.add(nll_sum, batch.num_own_targets)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        recovery_state.add(checkpoint, self)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        recovery_state.restore(checkpoint, self)
