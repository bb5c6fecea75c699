"""Lightning loggers of a run: the metrics file, TensorBoard, Weights & Biases."""

from typing import Any

import lightning.pytorch as lightning
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from reprise.runtime import RunFolder, World, say
from reprise.training.metrics_file import LoggerConfig, MetricsFile


class MetricsFileLogger(Logger):
    """`metrics.csv` as a Lightning logger; rank 0 writes."""

    def __init__(self, run: RunFolder) -> None:
        super().__init__()
        self.run = run
        self._file: MetricsFile | None = None

    @property
    def name(self) -> str:
        return "metrics_file"

    @property
    def version(self) -> str:
        return self.run.path.name

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Settings are in `config.yaml` beside the file."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if self._file is None:
            self._file = MetricsFile(self.run.metrics)
        self._file.append(metrics)


def build_loggers(settings: LoggerConfig, run: RunFolder, *, plain_config: dict[str, Any], group: str) -> list[Logger]:
    """The loggers of one run.

    Args:
        settings: which trackers beside the metrics file.
        run: where they write, offline.
        plain_config: the run's settings, for the trackers' own tables.
        group: what the tracker groups runs by.
    """
    loggers: list[Logger] = [MetricsFileLogger(run)]
    if settings.tensorboard:
        loggers.append(TensorBoardLogger(save_dir=run.path, name="tensorboard", version=""))
    if settings.wandb and settings.wandb_mode != "disabled":
        tracker = _wandb_logger(settings, run, plain_config, group)
        if tracker is not None:
            loggers.append(tracker)
    return loggers


def _wandb_logger(settings: LoggerConfig, run: RunFolder, plain_config: dict[str, Any], group: str) -> Logger | None:
    # The run's own digest is its id, so that the segments of a resumed run come together when they are synced.
    tracker = WandbLogger(
        project=settings.wandb_project,
        name=f"{group}-{run.path.name}",
        id=run.path.name,
        save_dir=run.path,
        offline=settings.wandb_mode == "offline",
        group=group,
        config=plain_config,
    )
    if World.from_environment().rank != 0:
        return tracker
    try:
        tracker.experiment.define_metric("*", step_metric="progress/tokens")
    except Exception as error:
        say(f"logger=wandb: not available ({str(error).splitlines()[0]}); metrics.csv is written all the same")
        return None
    return tracker


def finish_loggers(trainer: lightning.Trainer) -> None:
    """Close the tracker's run: the next job of a sweep in the same process must not go on in it."""
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger) and World.from_environment().rank == 0:
            logger.experiment.finish()
