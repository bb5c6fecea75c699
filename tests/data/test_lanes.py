"""Every token is predicted once an epoch, from the token before it, whatever the lanes and windows."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.data.lanes import IGNORE, LaneReader, document_order
from reprise.data.shards import ShardedTokens
from reprise.runtime import UserError

EOS = 0


@dataclass
class ArraySplit:
    tokens: np.ndarray | ShardedTokens
    doc_offsets: np.ndarray


def make_split(lengths: list[int]) -> ArraySplit:
    """Documents of these lengths, whose tokens are all different but for the `<eos>` at each end."""
    offsets = np.cumsum([0, *lengths])
    tokens = np.arange(1, offsets[-1] + 1)
    tokens[offsets[1:] - 1] = EOS
    return ArraySplit(tokens.astype(np.uint32), offsets)


def expected_stream(split: ArraySplit, *, seed: int, epoch: int, shuffle: bool) -> tuple[np.ndarray, set[int]]:
    """The epoch's tokens in order, and the positions at which documents begin."""
    order = range(len(split.doc_offsets) - 1)
    if shuffle:
        order = document_order(len(order), seed=seed, epoch=epoch)
    documents = [split.tokens[split.doc_offsets[d] : split.doc_offsets[d + 1]] for d in order]
    begins = np.cumsum([0, *(len(document) for document in documents)])[:-1]
    return np.concatenate(documents).astype(np.int64), set(begins.tolist())


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_every_token_is_predicted_exactly_once_an_epoch(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=20))
    split = make_split(lengths)
    num_tokens = int(split.doc_offsets[-1])
    num_lanes = data.draw(st.integers(1, num_tokens))
    window = data.draw(st.integers(1, 9))
    seed, epoch = data.draw(st.integers(0, 2**63)), data.draw(st.integers(0, 3))
    shuffle = data.draw(st.booleans())
    reader = LaneReader(split, num_lanes=num_lanes, window=window, seed=seed, eos_id=EOS, shuffle=shuffle)
    stream, begins = expected_stream(split, seed=seed, epoch=epoch, shuffle=shuffle)
    inputs = np.concatenate([[EOS], stream[:-1]])

    position = 0
    steps = range(epoch * reader.steps_per_epoch, (epoch + 1) * reader.steps_per_epoch)
    windows = [reader.windows(step, range(num_lanes)) for step in steps]
    for lane in range(num_lanes):
        tokens = np.concatenate([batch.tokens_BT[lane] for batch in windows])
        targets = np.concatenate([batch.targets_BT[lane] for batch in windows])
        resets = np.concatenate([batch.reset_BT[lane] for batch in windows])
        count = int((targets != IGNORE).sum())
        # A lane's targets come first, and its padding last.
        assert (targets[count:] == IGNORE).all() and not resets[count:].any()
        np.testing.assert_array_equal(targets[:count], stream[position : position + count])
        # A lane begins as a document does, wherever it begins.
        assert tokens[0] == EOS
        np.testing.assert_array_equal(tokens[1:count], inputs[position + 1 : position + count])
        wanted = {place - position for place in begins if position <= place < position + count} | {0}
        assert set(np.flatnonzero(resets).tolist()) == wanted
        position += count
    assert position == num_tokens
    for step, batch in zip(steps, windows, strict=True):
        assert reader.num_targets(step) == (batch.targets_BT != IGNORE).sum()


def test_windows_depend_on_their_arguments_only() -> None:
    split = make_split([3, 9, 1, 14, 6, 2])
    settings_ = {"num_lanes": 4, "window": 3, "seed": 5, "eos_id": EOS}
    reader = LaneReader(split, **settings_)
    steps = list(range(3 * reader.steps_per_epoch))
    straight = [reader.windows(step, range(4)) for step in steps]
    for step in reversed(steps):
        for lanes in ([2], [3, 0], [1, 1]):
            part = LaneReader(split, **settings_).windows(step, lanes)
            again = reader.windows(step, lanes)
            for name in ("tokens_BT", "targets_BT", "reset_BT"):
                wanted = getattr(straight[step], name)[lanes]
                np.testing.assert_array_equal(getattr(part, name), wanted)
                np.testing.assert_array_equal(getattr(again, name), wanted)


def test_dtypes_and_shapes_are_those_of_the_contract() -> None:
    batch = LaneReader(make_split([30]), num_lanes=4, window=5, seed=0, eos_id=EOS).windows(0, [1, 3])
    assert batch.tokens_BT.shape == batch.targets_BT.shape == batch.reset_BT.shape == (2, 5)
    assert batch.tokens_BT.dtype == batch.targets_BT.dtype == np.int64
    assert batch.reset_BT.dtype == np.bool_


def test_the_order_of_documents_changes_with_seed_and_epoch_and_stays_the_same_for_ever() -> None:
    orders = {(seed, epoch): tuple(document_order(50, seed=seed, epoch=epoch)) for seed in (0, 1) for epoch in (0, 1)}
    assert len(set(orders.values())) == 4
    assert all(sorted(order) == list(range(50)) for order in orders.values())
    # Written down, so that a change that would shuffle old runs anew is noticed.
    assert document_order(8, seed=1, epoch=0).tolist() == [3, 5, 2, 4, 1, 0, 6, 7]


def test_unshuffled_lanes_walk_the_split_as_it_is() -> None:
    split = make_split([4, 4])
    reader = LaneReader(split, num_lanes=1, window=8, seed=9, eos_id=EOS, shuffle=False)
    for epoch in range(2):
        np.testing.assert_array_equal(reader.windows(epoch, [0]).targets_BT[0], split.tokens)


def test_fewer_tokens_than_lanes_names_the_key_and_the_largest_value() -> None:
    with pytest.raises(UserError, match=r"data.num_lanes=8: .* 5 tokens.*data.num_lanes=5"):
        LaneReader(make_split([5]), num_lanes=8, window=2, seed=0, eos_id=EOS)
