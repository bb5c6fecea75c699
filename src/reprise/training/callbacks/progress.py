"""A progress bar for a person at a terminal; elsewhere the log lines of `throughput.py` are all there is."""

import sys

import lightning.pytorch as lightning
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from reprise.runtime import World
from reprise.training.callbacks.steps import StepCallback
from reprise.training.language_module import LanguageModule


class ProgressBar(StepCallback):
    """One line that moves; log lines printed meanwhile go above it."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._bar = self._progress.add_task("steps", total=None)

    @staticmethod
    def wanted(world: World) -> bool:
        """Whether somebody looks at this rank's terminal."""
        return world.rank == 0 and sys.stdout.isatty()

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        self._progress.start()

    def on_step_end(self, trainer: lightning.Trainer, module: LanguageModule) -> None:
        self._progress.update(self._bar, completed=trainer.global_step, total=module.budget.last_step)

    def on_train_end(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        self._progress.stop()

    def on_exception(
        self, trainer: lightning.Trainer, module: lightning.LightningModule, exception: BaseException
    ) -> None:
        self._progress.stop()
