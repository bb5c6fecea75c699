"""Batches: the same with workers, from any step on, and every lane once over ranks and groups."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import pytest
import torch

from reprise.data.corpora import DataConfig
from reprise.data.shards import Corpus
from reprise.distributed.membership import lane_groups, lanes_of_rank
from reprise.runtime import World
from reprise.training.datamodule import Batch, LaneDataModule


def make(
    corpus: Corpus, data: DataConfig, *, world: World | None = None, accumulate: int = 1, num_workers: int = 0
) -> LaneDataModule:
    data = replace(data, num_workers=num_workers)
    return LaneDataModule(corpus, data, world=world or World(), accumulate=accumulate, seed=3)


def plain(batches: Iterator[Batch], count: int) -> list[tuple[object, ...]]:
    return [
        (
            batch.step,
            batch.first_lane,
            batch.num_targets,
            batch.num_own_targets,
            batch.num_resets,
            batch.tokens_BT.tolist(),
            batch.targets_BT.tolist(),
            batch.reset_BT.tolist(),
        )
        for batch in islice(batches, count)
    ]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_workers_give_the_same_batches_in_the_same_order(
    small_corpus: Corpus, small_data: DataConfig, accumulate: int
) -> None:
    given = []
    for num_workers in (0, 2):
        datamodule = make(small_corpus, small_data, accumulate=accumulate, num_workers=num_workers)
        datamodule.first_step = 4
        given.append(plain(iter(datamodule.train_dataloader()), 9))
    assert given[0] == given[1]
    assert [batch[0] for batch in given[0]] == [4 + index // accumulate for index in range(9)]


def test_workers_end_a_validation_pass_together(small_corpus: Corpus, small_data: DataConfig) -> None:
    alone, helped = (
        plain(iter(make(small_corpus, small_data, num_workers=number).val_dataloader()), 10**6) for number in (0, 2)
    )
    assert alone == helped


def test_from_a_later_step_on_batches_are_those_of_a_run_from_the_start(
    small_corpus: Corpus, small_data: DataConfig
) -> None:
    whole = make(small_corpus, small_data, accumulate=2)
    resumed = make(small_corpus, small_data, accumulate=2)
    resumed.load_state_dict({"step": 3})
    assert plain(iter(resumed.train_dataloader()), 4) == plain(iter(whole.train_dataloader()), 10)[6:]


@pytest.mark.parametrize(("num_ranks", "accumulate"), [(1, 1), (1, 4), (2, 1), (2, 3), (4, 1), (6, 1)])
def test_ranks_and_groups_cover_every_lane_once_in_the_same_windows(
    small_corpus: Corpus, small_data: DataConfig, num_ranks: int, accumulate: int
) -> None:
    whole = next(iter(make(small_corpus, small_data).train_dataloader()))
    parts: list[Batch] = []
    for rank in range(num_ranks):
        world = World(rank=rank, size=num_ranks, local_rank=rank, local_size=num_ranks)
        loader = make(small_corpus, small_data, world=world, accumulate=accumulate).train_dataloader()
        parts += islice(loader, accumulate)
    assert all(part.step == 0 and part.num_targets == whole.num_targets for part in parts)
    lanes = [lane for part in parts for lane in range(part.first_lane, part.first_lane + len(part.tokens_BT))]
    assert lanes == list(range(small_data.num_lanes))
    for name in ("tokens_BT", "targets_BT", "reset_BT"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))
    assert sum(part.num_own_targets for part in parts) == whole.num_targets
    assert sum(part.num_resets for part in parts) == whole.num_resets


@pytest.mark.parametrize("num_lanes", [1, 5, 8])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
def test_lanes_of_ranks_are_contiguous_even_and_complete(num_lanes: int, num_ranks: int) -> None:
    owned = [lanes_of_rank(num_lanes, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    assert [lane for lanes in owned for lane in lanes] == list(range(num_lanes))
    assert max(map(len, owned)) - min(map(len, owned)) <= 1


@pytest.mark.parametrize("num_groups", [1, 2, 3, 5])
def test_groups_cover_a_ranks_lanes(num_groups: int) -> None:
    groups = lane_groups(range(3, 8), num_groups)
    assert [lane for group in groups for lane in group] == [3, 4, 5, 6, 7]
    assert all(len(group) >= 1 for group in groups)


@pytest.mark.parametrize("split", ["val", "test"])
@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_one_pass_predicts_every_token_of_a_split_once_over_the_ranks(
    small_corpus: Corpus, small_data: DataConfig, split: str, num_ranks: int
) -> None:
    counted = 0
    for rank in range(num_ranks):
        datamodule = make(small_corpus, small_data, world=World(rank, num_ranks, rank, num_ranks))
        loader = datamodule.val_dataloader() if split == "val" else datamodule.test_dataloader()
        counted += sum(batch.num_own_targets for batch in loader)
    assert counted == small_corpus.split(split).num_tokens


def test_a_seed_gives_an_order_of_documents(small_corpus: Corpus, small_data: DataConfig) -> None:
    first = plain(iter(make(small_corpus, small_data).train_dataloader()), 2)
    other = LaneDataModule(small_corpus, small_data, world=World(), accumulate=1, seed=4)
    assert plain(iter(other.train_dataloader()), 2) != first
    assert plain(iter(other.val_dataloader()), 2) == plain(iter(make(small_corpus, small_data).val_dataloader()), 2)
