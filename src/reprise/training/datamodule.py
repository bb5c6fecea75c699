"""Batches of lanes for Lightning; its whole state is one integer, the step.

B this rank's lanes of one accumulation group, T window.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from reprise.data.corpora import SPLITS, DataConfig
from reprise.data.lanes import LaneReader
from reprise.data.shards import Corpus
from reprise.distributed.membership import lane_groups, lanes_of_rank
from reprise.runtime import World


@dataclass
class Batch:
    """Window `step` of consecutive lanes.

    `num_targets` counts the step's targets over all lanes of all ranks, `num_own_targets` those in this batch; both are
    known without asking another rank or the device.
    """

    tokens_BT: Tensor
    targets_BT: Tensor
    reset_BT: Tensor
    first_lane: int
    step: int
    num_targets: int
    num_own_targets: int
    num_resets: int


class _Windows(IterableDataset[Batch]):
    """Batches of steps `first_step` to `end_step` (exclusive; None: for ever), a step's groups one after the other."""

    def __init__(self, reader: LaneReader, groups: list[range], *, first_step: int, end_step: int | None) -> None:
        self.reader = reader
        self.groups = groups
        self.first_step = first_step
        self.end_step = end_step

    def __iter__(self) -> Iterator[Batch]:
        # A DataLoader takes from its workers in turn, so worker w of W makes batches w, w + W, ... and order is kept.
        worker = get_worker_info()
        index, stride = (0, 1) if worker is None else (worker.id, worker.num_workers)
        while True:
            step, group = divmod(index, len(self.groups))
            step += self.first_step
            if self.end_step is not None and step >= self.end_step:
                return
            yield read_batch(self.reader, step, self.groups[group])
            index += stride


def read_batch(reader: LaneReader, step: int, lanes: range) -> Batch:
    """Window `step` of `lanes` as tensors."""
    windows = reader.windows(step, lanes)
    return Batch(
        tokens_BT=torch.from_numpy(windows.tokens_BT),
        targets_BT=torch.from_numpy(windows.targets_BT),
        reset_BT=torch.from_numpy(windows.reset_BT),
        first_lane=lanes.start,
        step=step,
        num_targets=reader.num_targets(step),
        num_own_targets=int((windows.targets_BT >= 0).sum()),
        num_resets=int(windows.reset_BT.sum()),
    )


class LaneDataModule(lightning.LightningDataModule):
    """Training lanes that never end, and one pass over the validation and the test lanes."""

    def __init__(self, corpus: Corpus, data: DataConfig, *, world: World, accumulate: int, seed: int) -> None:
        super().__init__()
        self.corpus = corpus
        self.readers = {
            split: LaneReader(
                corpus.split(split),
                num_lanes=data.num_lanes if split == "train" else data.eval_lanes,
                window=data.window,
                seed=seed,
                shuffle=split == "train",
                eos_id=corpus.tokenizer.eos_id,
                lanes_key="data.num_lanes" if split == "train" else "data.eval_lanes",
            )
            for split in SPLITS
        }
        self.world = world
        self.accumulate = accumulate
        self.num_workers = data.num_workers
        self.first_step = 0

    def lanes(self, split: str) -> range:
        """This rank's lanes of a split."""
        return lanes_of_rank(self.readers[split].num_lanes, rank=self.world.rank, num_ranks=self.world.size)

    def train_dataloader(self) -> DataLoader[Batch]:
        groups = lane_groups(self.lanes("train"), self.accumulate)
        return self._loader(_Windows(self.readers["train"], groups, first_step=self.first_step, end_step=None))

    def val_dataloader(self) -> DataLoader[Batch]:
        return self._one_pass("val")

    def test_dataloader(self) -> DataLoader[Batch]:
        return self._one_pass("test")

    def _one_pass(self, split: str) -> DataLoader[Batch]:
        reader, lanes = self.readers[split], self.lanes(split)
        # More ranks than evaluation lanes: a rank without one has nothing to read and only joins the sum.
        end_step = reader.steps_per_epoch if lanes else 0
        return self._loader(_Windows(reader, [lanes], first_step=0, end_step=end_step))

    def _loader(self, windows: _Windows) -> DataLoader[Batch]:
        return DataLoader(
            windows,
            batch_size=None,
            num_workers=self.num_workers,
            prefetch_factor=4 if self.num_workers else None,
            persistent_workers=False,
        )

    def state_dict(self) -> dict[str, Any]:
        assert self.trainer is not None
        return {"step": self.trainer.global_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.first_step = state_dict["step"]
