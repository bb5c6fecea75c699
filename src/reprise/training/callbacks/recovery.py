"""Saving, stopping and being stopped: everything that happens at the border between two steps."""

import signal
import time
from types import FrameType

import lightning.pytorch as lightning
import torch

from reprise.runtime import RunFolder, say
from reprise.training.budget import Landing
from reprise.training.callbacks.steps import StepCallback
from reprise.training.checkpoint import CheckpointConfig
from reprise.training.datamodule import Batch
from reprise.training.language_module import LanguageModule

# Steps between two agreements of several ranks on clock and signals; one rank needs no agreement and looks every step.
AGREE_EVERY_STEPS = 5


class StopSignal:
    """Remembers SIGTERM or Ctrl-C; all ranks together decide what follows, at the next border between steps."""

    def __init__(self) -> None:
        self.number = 0

    def install(self) -> None:
        """Take SIGTERM from Lightning, whose handler runs a collective: a rank that is told alone waits for ever."""
        signal.signal(signal.SIGTERM, self._handle)
        signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.number and number == signal.SIGINT:
            # Told twice by hand: at once.
            raise KeyboardInterrupt
        self.number = number


class Recovery(StepCallback):
    """Saves by steps and by minutes, ends the run by its budget, and saves and stops when told to.

    A checkpoint is written where the next step begins, after the validation of the last one, so a resumed run repeats
    or skips neither. Nothing is saved while an exception unwinds: saving is a collective, and the others never join it.
    """

    def __init__(self, run: RunFolder, settings: CheckpointConfig, stop_signal: StopSignal) -> None:
        self.run = run
        self.settings = settings
        self.stop_signal = stop_signal
        self.saved_step: int | None = None
        self.saved_at_s = time.monotonic()
        self.save_due = False
        self.stopped_by = 0

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        assert isinstance(module, LanguageModule)
        # Lightning put its handlers in place when the fit began, so ours go in now.
        self.stop_signal.install()
        self.saved_step = trainer.global_step
        self.saved_at_s = time.monotonic()
        module.budget.start_clock()

    def on_train_batch_start(
        self, trainer: lightning.Trainer, module: lightning.LightningModule, batch: Batch, batch_index: int
    ) -> None:
        if self.save_due and batch_index % trainer.accumulate_grad_batches == 0:
            self._save(trainer)

    def on_step_end(self, trainer: lightning.Trainer, module: LanguageModule) -> None:
        step = trainer.global_step
        every = self.settings.every_steps
        self.save_due = self.save_due or (every is not None and step % every == 0)
        if module.world.size == 1 or step % AGREE_EVERY_STEPS == 0:
            self._decide(trainer, module, step)
        elif module.budget.last_step is not None and step >= module.budget.last_step:
            _end_here(trainer)

    def on_train_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        assert isinstance(module, LanguageModule)
        module.budget.stop_clock()
        if self.saved_step != trainer.global_step or self.save_due:
            self._save(trainer)

    def _decide(self, trainer: lightning.Trainer, module: LanguageModule, step: int) -> None:
        """Clock and signals, seen by rank 0 or by any rank, become decisions of all ranks at the same step."""
        elapsed_s = module.budget.elapsed_s()
        landing = module.budget.plan_landing(step, elapsed_s) if module.world.rank == 0 else None
        minutes = self.settings.every_minutes
        is_time_to_save = minutes is not None and time.monotonic() - self.saved_at_s >= minutes * 60
        seen = [
            self.stop_signal.number,
            module.world.rank == 0 and module.budget.is_over(step, elapsed_s),
            module.world.rank == 0 and is_time_to_save,
            0 if landing is None else landing.end_step,
        ]
        decided = torch.tensor([int(value) for value in seen], device=module.device)
        if module.world.size > 1:
            torch.distributed.all_reduce(decided, op=torch.distributed.ReduceOp.MAX)
        stop, over, save, end_step = decided.tolist()
        if end_step:
            module.budget.landing = Landing(step, end_step)
            self.run.event("landing", step=step, end_step=end_step)
            say(f"train.max_minutes will run out first: annealing from step {step}, ending at step {end_step}")
        self.save_due = self.save_due or bool(save)
        self.stopped_by = int(stop)
        if stop or over:
            _end_here(trainer)

    def _save(self, trainer: lightning.Trainer) -> None:
        started = time.monotonic()
        step = trainer.global_step
        # The file's name comes from its contents; `AtomicCheckpointIO` takes only the folder from this path.
        trainer.save_checkpoint(self.run.checkpoints / f"step_{step:08d}")
        self.saved_step, self.saved_at_s, self.save_due = step, time.monotonic(), False
        self.run.event("checkpoint", step=step, seconds=round(self.saved_at_s - started, 3))


def _end_here(trainer: lightning.Trainer) -> None:
    """End the fit after this step. `should_stop` would first validate, which a process told to stop has no time for."""
    trainer.fit_loop.epoch_loop.max_steps = trainer.global_step
