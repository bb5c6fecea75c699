"""A run from here to its end: the module, its data, Lightning's Trainer and what hangs on it, put together once."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import lightning.pytorch as lightning
import torch
from lightning.pytorch.loggers import Logger

from reprise.data.corpora import DataConfig
from reprise.data.shards import Corpus
from reprise.distributed.membership import ClusterConfig
from reprise.evaluation.report import read_curves
from reprise.models import LanguageModel
from reprise.runtime import SIGNAL_EXIT_CODE, RunFolder, World, from_rank_zero, say
from reprise.training.allocator import keep_freed_memory
from reprise.training.budget import Budget, TrainConfig
from reprise.training.callbacks.gradients import GradientMonitor
from reprise.training.callbacks.progress import ProgressBar
from reprise.training.callbacks.recovery import Recovery, StopSignal
from reprise.training.callbacks.throughput import StepMetrics, ThroughputMonitor, progress_metrics
from reprise.training.checkpoint import CheckpointConfig, CheckpointFile, load_checkpoint, newest_whole_checkpoint
from reprise.training.datamodule import LaneDataModule
from reprise.training.language_module import LanguageModule
from reprise.training.loggers import finish_loggers
from reprise.training.optim import OptimConfig, ScheduleConfig
from reprise.training.recovery_state import KEY, check_identity, check_same_text
from reprise.training.trainer import build_trainer, effective_precision


@dataclass
class Settings:
    """The sections of the config that training reads."""

    data: DataConfig
    train: TrainConfig
    optim: OptimConfig
    schedule: ScheduleConfig
    cluster: ClusterConfig
    checkpoint: CheckpointConfig
    seed: int


class Session:
    """Trains and scores one model.

    Args:
        model: fresh weights, or those of another run.
        corpus: prepared text.
        settings: the config's sections.
        budget: when training ends.
        run: where everything is written.
        world: this rank.
        identity: what a checkpoint must share with this run.
        loggers: where metrics go; none for a session that only scores.
    """

    def __init__(
        self,
        model: LanguageModel,
        corpus: Corpus,
        *,
        settings: Settings,
        budget: Budget,
        run: RunFolder,
        world: World,
        identity: dict[str, Any],
        loggers: Sequence[Logger] = (),
    ) -> None:
        self.settings = settings
        self.run = run
        self.world = world
        self.budget = budget
        train = settings.train
        if train.num_threads is not None:
            torch.set_num_threads(train.num_threads)
        keep_freed_memory()
        self.precision = effective_precision(settings.cluster)
        self.datamodule = LaneDataModule(
            corpus, settings.data, world=world, accumulate=train.accumulate, seed=settings.seed
        )
        self.module = LanguageModule(
            model,
            optim=settings.optim,
            schedule=settings.schedule,
            budget=budget,
            world=world,
            lanes=self.datamodule.lanes("train"),
            accumulate=train.accumulate,
            seed=settings.seed,
            identity=identity,
            corpus_name=corpus.folder.name,
            label_smoothing=train.label_smoothing,
            z_loss=train.z_loss,
        )
        metrics = StepMetrics(train.log_every_steps)
        self.stop_signal = StopSignal()
        self.recovery = Recovery(run, settings.checkpoint, self.stop_signal)
        self.throughput = ThroughputMonitor(metrics, flops_per_token=model.flops_per_token())
        callbacks: list[lightning.Callback] = [GradientMonitor(metrics), self.throughput, self.recovery]
        if ProgressBar.wanted(world):
            callbacks.append(ProgressBar())
        self.trainer = build_trainer(
            train,
            settings.cluster,
            world=world,
            run=run,
            planned_steps=budget.planned_steps,
            keep_latest=settings.checkpoint.keep_latest,
            precision=self.precision,
            loggers=loggers,
            callbacks=callbacks,
        )

    def banner(self) -> str:
        """What the run is about to do, in the words people look for."""
        settings, model, corpus = self.settings, self.module.model, self.datamodule.corpus
        parameters, tokens = model.num_parameters(), corpus.split("train").num_tokens
        step_tokens, steps = settings.data.num_lanes * settings.data.window, self.budget.planned_steps
        plan = "until the clock stops it"
        if steps is not None:
            plan = f"{steps} steps, {steps * step_tokens:,} tokens, {steps * step_tokens / tokens:.2f} epochs"
        if self.budget.max_seconds is not None:
            plan += f", at most {self.budget.max_seconds / 60:g} minutes"
        lines = {
            "run": str(self.run.path),
            "model": f"{parameters:,} parameters, {parameters - model.embedding.weight.numel():,} without embedding",
            "corpus": f"{corpus.folder.name}: {tokens:,} training tokens, vocabulary {corpus.tokenizer.vocab_size:,}",
            "batch": f"{settings.data.num_lanes} lanes x {settings.data.window} = {step_tokens:,} tokens a step,"
            f" {self.world.size} rank(s) x {settings.train.accumulate} group(s)",
            "plan": plan,
            "device": f"{self.precision} on {settings.cluster.accelerator}, {torch.get_num_threads()} threads a rank",
            "seed": str(settings.seed),
        }
        return "\n".join(f"{name:<11} {text}" for name, text in lines.items())

    def fit(self) -> dict[str, Any]:
        """Train from the newest whole checkpoint, or from the start, to the end of the budget.

        Returns:
            The facts of training: steps, tokens, seconds, speed, the last logged loss, device and precision.

        Raises:
            UserError: the run's checkpoints are of another text, model or tokenizer.
            SystemExit: SIGTERM or Ctrl-C came; a checkpoint was saved and the same command resumes.
        """
        newest = from_rank_zero(lambda: newest_whole_checkpoint(self.run.checkpoints), self.world)
        self.run.event("start", ranks=self.world.size, step=0 if newest is None else newest.step)
        if newest is None:
            self._fit(None)
        elif not self._take_if_over(newest):
            say(f"resuming from step {newest.step} ({newest.path.name})")
            self._fit(str(newest.path))
        return self._facts()

    def score(self, split: str) -> dict[str, float]:
        """Scores of a whole split ("val" or "test") over all ranks, with the state carried from window to window."""
        known = self.throughput.val_scores
        if split == "val" and known is not None and known[0] == self.trainer.global_step > 0:
            return known[1]
        # 0 where training does not validate, which would also leave out this pass.
        self.trainer.limit_val_batches = 1.0
        if split == "test":
            self.trainer.test(self.module, datamodule=self.datamodule, verbose=False)
        else:
            self.trainer.validate(self.module, datamodule=self.datamodule, verbose=False)
        return self.throughput.last_scores

    def device_facts(self) -> dict[str, Any]:
        """What the numbers were really computed on."""
        device = torch.cuda.get_device_name() if self.settings.cluster.accelerator == "gpu" else "cpu"
        return {
            "device": device,
            "precision": self.precision,
            "ranks": self.world.size,
            "threads": torch.get_num_threads(),
        }

    def close(self) -> None:
        """Let go of the loggers; nothing is trained or scored afterwards."""
        finish_loggers(self.trainer)

    def _fit(self, path: str | None) -> None:
        self.trainer.fit(self.module, datamodule=self.datamodule, ckpt_path=path, weights_only=True)
        if number := self.recovery.stopped_by:
            name, step = signal.Signals(number).name, self.trainer.global_step
            say(f"stopped by {name} after step {step} and saved; the same command resumes")
            raise SystemExit(SIGNAL_EXIT_CODE + number)

    def _take_if_over(self, newest: CheckpointFile) -> bool:
        """A run killed between its last step and its result has only the scores left to do."""
        contents = load_checkpoint(newest.path)
        saved = contents[KEY]
        check_same_text(saved["corpus"], self.datamodule.corpus.folder.name, self.run)
        check_identity(saved["identity"], self.module.identity, where=str(newest.path))
        precision = saved["precision"]
        if precision != self.precision:
            say(f"this run was saved in {precision} and goes on in {self.precision}: its weights will not be the same")
        self.module.on_load_checkpoint(contents)
        if not self.budget.is_over(newest.step, self.budget.elapsed_s()):
            return False
        self.module.load_state_dict(contents["state_dict"])
        self.trainer.fit_loop.load_state_dict(contents["loops"]["fit_loop"])
        return True

    def _facts(self) -> dict[str, Any]:
        progress = progress_metrics(self.trainer, self.module, self.datamodule)
        seconds = self.budget.elapsed_s()
        rows = read_curves(self.run.metrics) if self.run.metrics.exists() else []
        logged = [row for row in rows if "train/loss" in row]
        peaks = sorted({name for row in logged for name in row if name.startswith("mem/")})
        return self.device_facts() | {
            "progress/step": int(progress["progress/step"]),
            "progress/tokens": int(progress["progress/tokens"]),
            "progress/epoch": progress["progress/epoch"],
            "train/loss": logged[-1]["train/loss"] if logged else None,
            "train_seconds": round(seconds, 3),
            # Of the log windows, which leave validation and saving out.
            "perf/tokens_per_s": median(row["perf/tokens_per_s"] for row in logged) if logged else None,
            # Peaks of every process that took part: a resumed run has had several.
            **{name: max(row[name] for row in logged if name in row) for name in peaks},
        }
