"""Token shards on disk: several read as one, ids of either width, and damage that is named."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reprise.data.corpora import DataConfig, PrepareConfig
from reprise.data.lanes import LaneReader
from reprise.data.prepare import prepare
from reprise.data.shards import Corpus, ShardedTokens, SplitWriter, open_corpus, token_dtype
from reprise.runtime import UserError


def test_lanes_read_the_prepared_corpus(sotu: Corpus) -> None:
    split = sotu.split("val")
    reader = LaneReader(split, num_lanes=4, window=64, seed=0, eos_id=sotu.tokenizer.eos_id, shuffle=False)
    np.testing.assert_array_equal(reader.windows(0, range(4)).targets_BT[0], split.tokens[:64])
    assert sum(reader.num_targets(step) for step in range(reader.steps_per_epoch)) == split.num_tokens


def test_several_shards_hold_the_same_tokens(sotu: Corpus, tmp_path: Path) -> None:
    sharded = prepare(DataConfig(), PrepareConfig(shard_mib=1), tmp_path)
    assert [shard["num_bytes"] for shard in sharded.manifest["splits"]["train"]["shards"]][:2] == [1 << 20] * 2
    one, several = sotu.split("train"), sharded.split("train")
    np.testing.assert_array_equal(several.tokens[: len(several.tokens)], one.tokens[:])
    np.testing.assert_array_equal(several.doc_offsets, one.doc_offsets)
    settings = {"num_lanes": 7, "window": 50, "seed": 3, "eos_id": 2}
    for step in (0, 77, 10_000):
        left, right = (LaneReader(split, **settings).windows(step, range(7)) for split in (one, several))
        np.testing.assert_array_equal(left.targets_BT, right.targets_BT)


def test_a_damaged_folder_is_named(write_jsonl: Callable[..., Path], tmp_path: Path) -> None:
    corpus = prepare(DataConfig(source=str(write_jsonl(25)), vocab_size=350), PrepareConfig(), tmp_path / "root")
    tokens = corpus.folder / "train-00000.tokens"
    sound = tokens.read_bytes()
    tokens.write_bytes(bytes(len(sound)))
    with pytest.raises(UserError, match=r"train-00000.tokens: its content .* delete the folder"):
        open_corpus(corpus.folder).verify()
    tokens.write_bytes(sound[:-2])
    with pytest.raises(UserError, match=f"train-00000.tokens: {len(sound) - 2} bytes, not {len(sound)}"):
        open_corpus(corpus.folder)
    tokens.unlink()
    with pytest.raises(UserError, match=r"train-00000.tokens: it is missing"):
        open_corpus(corpus.folder)
    with pytest.raises(UserError, match="no prepared corpus"):
        open_corpus(tmp_path / "nowhere")


def test_ids_of_a_large_vocabulary_take_four_bytes(tmp_path: Path) -> None:
    assert (token_dtype(1 << 16), token_dtype((1 << 16) + 1)) == (np.uint16, np.uint32)
    writer = SplitWriter(tmp_path, "train", dtype=token_dtype(100_000), shard_tokens=2)
    writer.add(np.array([99_999, 1, 65_536], dtype=np.uint32), num_bytes=5, num_words=2)
    entry = writer.close()
    assert [shard["num_bytes"] for shard in entry["shards"]] == [8, 4]
    assert np.fromfile(tmp_path / "train-00001.tokens", dtype="<u4").tolist() == [65_536]


@settings(deadline=None, max_examples=50)
@given(sizes=st.lists(st.integers(1, 7), min_size=1, max_size=6), data=st.data())
def test_several_shards_read_as_one_array(sizes: list[int], data: st.DataObject) -> None:
    whole = np.arange(sum(sizes), dtype=np.uint16)
    sharded = ShardedTokens(np.split(whole, np.cumsum(sizes)[:-1]))
    start, stop = data.draw(st.integers(0, len(whole))), data.draw(st.integers(0, len(whole)))
    places = np.array(data.draw(st.lists(st.integers(0, len(whole) - 1), min_size=4, max_size=4))).reshape(2, 2)
    assert len(sharded) == len(whole) and sharded.dtype == whole.dtype
    np.testing.assert_array_equal(sharded[start:stop], whole[start:stop])
    np.testing.assert_array_equal(sharded[places], whole[places])
    assert sharded[int(places[0, 0])] == whole[places[0, 0]]
