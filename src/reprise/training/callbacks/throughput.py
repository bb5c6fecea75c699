"""The numbers of a log step and where they go: loggers, and one line for the reader."""

import math
import resource
import sys
import time
from typing import Any

import lightning.pytorch as lightning
import torch

from reprise.data.lanes import LaneReader
from reprise.evaluation.language import language_scores, perplexity
from reprise.runtime import say
from reprise.training.callbacks.steps import StepCallback
from reprise.training.datamodule import Batch, LaneDataModule
from reprise.training.language_module import LanguageModule, LogWindow

# What the system counts the peak of resident memory in (man 2 getrusage): KiB, but bytes on macOS.
_MAXRSS_BYTES = 1 if sys.platform == "darwin" else 1024


class StepMetrics:
    """The metrics of the coming log step; callbacks that run earlier put theirs in."""

    def __init__(self, every_steps: int) -> None:
        self.every_steps = every_steps
        self.values: dict[str, float] = {}

    def is_log_step(self, step: int) -> bool:
        """Whether the metrics of optimizer step `step` are logged."""
        return step % self.every_steps == 0


class ThroughputMonitor(StepCallback):
    """Logs every `every_steps` optimizer steps and after each validation.

    Speed is an average over the log window with validation and saving taken out. Loss is the sum over the window's
    tokens on all ranks divided by their number.
    """

    def __init__(self, metrics: StepMetrics, *, flops_per_token: int) -> None:
        self.metrics = metrics
        self.flops_per_token = flops_per_token
        self.last_scores: dict[str, float] = {}
        # The step of the last validation and what it found.
        self.val_scores: tuple[int, dict[str, float]] | None = None
        self._clear_clocks()

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        # Only the clocks: the counts of a window that a checkpoint cut in two go on.
        self._clear_clocks()

    def on_train_batch_start(
        self, trainer: lightning.Trainer, module: lightning.LightningModule, batch: Batch, batch_index: int
    ) -> None:
        # Callbacks run in order and the one that saves comes later, so this interval holds only the wait for data.
        self._wait_s += time.perf_counter() - self._batch_ended_s

    def on_train_batch_end(
        self,
        trainer: lightning.Trainer,
        module: lightning.LightningModule,
        outputs: Any,
        batch: Batch,
        batch_index: int,
    ) -> None:
        assert isinstance(module, LanguageModule)
        self._batch_ended_s = time.perf_counter()
        self._busy_s += self._batch_ended_s - module.batch_started_s
        self._own_tokens += batch.num_own_targets
        self._num_batches += 1
        super().on_train_batch_end(trainer, module, outputs, batch, batch_index)

    def on_step_end(self, trainer: lightning.Trainer, module: LanguageModule) -> None:
        if not self.metrics.is_log_step(trainer.global_step):
            return
        values = self._window_metrics(trainer, module)
        values |= self.metrics.values
        self.metrics.values = {}
        log_everywhere(trainer, values)
        say(self._line(module, values))
        module.log_window = LogWindow()
        self._clear_clocks()

    def on_validation_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        self._log_scores(trainer, module, "val")
        self.val_scores = (trainer.global_step, self.last_scores)

    def on_test_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        self._log_scores(trainer, module, "test")

    def _log_scores(self, trainer: lightning.Trainer, module: lightning.LightningModule, split: str) -> None:
        assert isinstance(module, LanguageModule)
        datamodule = lane_datamodule(trainer)
        tokens = datamodule.corpus.split(split)
        module.eval_tally.reduce(module.device)
        self.last_scores = language_scores(
            split, module.eval_tally, num_bytes=tokens.num_bytes, num_words=tokens.num_words
        )
        log_everywhere(trainer, progress_metrics(trainer, module, datamodule) | self.last_scores)
        scores = " | ".join(f"{name} {value:.4f}" for name, value in self.last_scores.items())
        say(f"step {trainer.global_step} | {scores}" if module.train_states is not None else scores)
        self._batch_ended_s = time.perf_counter()

    def _window_metrics(self, trainer: lightning.Trainer, module: LanguageModule) -> dict[str, float]:
        window_s = self._wait_s + self._busy_s
        window = module.log_window
        window.tally.reduce(module.device)
        loss = window.tally.loss
        # Of the batches this process timed, which after a resume are not the whole window.
        timed_steps = self._num_batches / trainer.accumulate_grad_batches
        steps = self.metrics.every_steps
        tokens_per_s = self._own_tokens * module.world.size / window_s
        values = progress_metrics(trainer, module, lane_datamodule(trainer))
        values |= {
            "train/loss": loss,
            "train/ppl": perplexity(loss),
            "optim/lr": trainer.optimizers[0].param_groups[0]["lr"],
            "optim/grad_norm": float(module.grad_norm),
            "optim/clip_frac": float(window.num_clipped) / steps,
            "perf/tokens_per_s": tokens_per_s,
            "perf/step_ms": 1000 * window_s / timed_steps,
            "perf/data_wait_pct": 100 * self._wait_s / window_s,
            "perf/tflops": tokens_per_s * self.flops_per_token / 1e12,
            "mem/max_resident_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_BYTES / 2**30,
            "rnn/state_resets": float(window.num_resets),
        }
        if torch.cuda.is_available():
            values["mem/max_allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
        assert module.train_states is not None
        norms = module.train_states.norms()
        for index, name in enumerate(("rnn/h_norm", "rnn/c_norm")):
            if len(norms[0]) > index:
                values[name] = sum(layer[index] for layer in norms) / len(norms)
        return values

    def _clear_clocks(self) -> None:
        self._wait_s = self._busy_s = 0.0
        self._own_tokens = self._num_batches = 0
        self._batch_ended_s = time.perf_counter()

    def _line(self, module: LanguageModule, values: dict[str, float]) -> str:
        step, last_step = int(values["progress/step"]), module.budget.last_step
        elapsed_s = module.budget.elapsed_s()
        left_s = math.inf if last_step is None else (last_step - step) * values["perf/step_ms"] / 1000
        if module.budget.max_seconds is not None:
            left_s = min(left_s, max(0.0, module.budget.max_seconds - elapsed_s))
        return (
            f"step {step}/{'?' if last_step is None else last_step} | tokens {_short(values['progress/tokens'])}"
            f" | loss {values['train/loss']:.3f} | ppl {values['train/ppl']:.1f} | lr {values['optim/lr']:.1e}"
            f" | gnorm {values['optim/grad_norm']:.2f} | {_short(values['perf/tokens_per_s'])} tok/s"
            f" | data {values['perf/data_wait_pct']:.0f}% | eta {_clock(left_s)}"
        )


def lane_datamodule(trainer: lightning.Trainer) -> LaneDataModule:
    """The trainer's data module, typed."""
    datamodule = trainer.datamodule  # type: ignore[attr-defined]
    assert isinstance(datamodule, LaneDataModule)
    return datamodule


def progress_metrics(
    trainer: lightning.Trainer, module: LanguageModule, datamodule: LaneDataModule
) -> dict[str, float]:
    """Where the run is: optimizer steps, tokens predicted over all ranks, epochs, hours of training."""
    reader, step = datamodule.readers["train"], trainer.global_step
    return {
        "progress/step": float(step),
        "progress/tokens": float(tokens_until(reader, step)),
        "progress/epoch": step / reader.steps_per_epoch,
        "progress/hours": module.budget.elapsed_s() / 3600,
    }


def tokens_until(reader: LaneReader, step: int) -> int:
    """Tokens predicted over all lanes in the steps before `step`; only an epoch's last windows are not full."""
    epochs, steps = divmod(step, reader.steps_per_epoch)
    return epochs * reader.tokens_per_epoch + min(steps * reader.num_lanes * reader.window, reader.tokens_per_epoch)


def log_everywhere(trainer: lightning.Trainer, values: dict[str, float]) -> None:
    """Hand one row to every logger."""
    for logger in trainer.loggers:
        logger.log_metrics(values, step=trainer.global_step)


def _short(count: float) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return f"{count:.0f}"


def _clock(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "?"
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"
