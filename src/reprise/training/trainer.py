"""Lightning's Trainer as used here: ranks come from outside, checkpoints are ours, nothing is decided silently."""

import logging
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import DDPStrategy, Strategy

from reprise.distributed.membership import ClusterConfig
from reprise.runtime import RunFolder, World, say
from reprise.training.budget import TrainConfig
from reprise.training.checkpoint import load_checkpoint, save_checkpoint

# What Lightning warns of and is meant: our loaders read memory maps, resume by step, and ranks come from an agent.
_EXPECTED_WARNINGS = (
    ".*does not have many workers.*",
    ".*`IterableDataset` has `__len__` defined.*",
    ".*your dataloader is not resumable.*",
    ".*Checkpoint directory .* exists and is not empty.*",
    ".*bf16 is supported for historical reasons.*",
    ".*GPU available but not used.*",
    ".*You have overridden `.*` in `LightningModule` but.*",
    ".*You defined a `validation_step` but have no `val_dataloader`.*",
    ".*isinstance.treespec, LeafSpec.*",
)


class AtomicCheckpointIO(CheckpointIO):
    """Lightning's files through `training/checkpoint.py`; the stock one copies across file systems without fsync."""

    def __init__(self, keep_latest: int) -> None:
        self.keep_latest = keep_latest

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        save_checkpoint(checkpoint, Path(path).parent, step=checkpoint["global_step"], keep_latest=self.keep_latest)

    def load_checkpoint(
        self, path: Any, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return load_checkpoint(Path(path))

    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink(missing_ok=True)


def effective_precision(cluster: ClusterConfig) -> str:
    """The precision really used: `auto` looks at the device, and what the device cannot do is said and replaced."""
    if cluster.precision == "auto":
        if cluster.accelerator == "gpu":
            return "bf16-mixed" if torch.cuda.is_bf16_supported(including_emulation=False) else "16-mixed"
        return "bf16-mixed" if _cpu_multiplies_bf16() else "32-true"
    if cluster.accelerator == "cpu" and cluster.precision == "16-mixed":
        say(
            "cluster.precision=16-mixed: Lightning has no fp16 training on a CPU;"
            " this run uses bf16-mixed, without loss scaling"
        )
        return "bf16-mixed"
    return cluster.precision


def _cpu_multiplies_bf16() -> bool:
    """Whether bf16 products are instructions here; elsewhere they are emulated, and slower than fp32 ones."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def build_trainer(
    train: TrainConfig,
    cluster: ClusterConfig,
    *,
    world: World,
    run: RunFolder,
    planned_steps: int | None,
    keep_latest: int,
    precision: str,
    loggers: Sequence[Logger],
    callbacks: Sequence[lightning.Callback],
) -> lightning.Trainer:
    """A Trainer for this rank; starts no process."""
    _quiet_lightning()
    validate_every = train.validate_every_steps
    return lightning.Trainer(
        accelerator=cluster.accelerator,
        devices=world.local_size,
        num_nodes=world.num_nodes,
        strategy=_strategy(cluster, world),
        precision=precision,  # type: ignore[arg-type]
        plugins=[
            AtomicCheckpointIO(keep_latest),
            TorchElasticEnvironment() if world.size > 1 else LightningEnvironment(),
        ],
        max_steps=-1 if planned_steps is None else planned_steps,
        max_epochs=-1,
        accumulate_grad_batches=train.accumulate,
        gradient_clip_val=train.clip_norm,
        val_check_interval=None if validate_every is None else validate_every * train.accumulate,
        check_val_every_n_epoch=None if validate_every is not None else 1,
        limit_val_batches=0 if validate_every is None else None,
        num_sanity_val_steps=0,
        logger=list(loggers),
        callbacks=list(callbacks),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=run.path,
    )


def _strategy(cluster: ClusterConfig, world: World) -> Strategy | str:
    if world.size == 1:
        return "auto"
    return DDPStrategy(
        process_group_backend=cluster.backend,
        timeout=timedelta(seconds=cluster.timeout_s),
        find_unused_parameters=False,
        gradient_as_bucket_view=True,
    )


def _quiet_lightning() -> None:
    """Keep what a user needs; the start banner already says the rest."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for pattern in _EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", pattern)
