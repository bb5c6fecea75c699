"""Lanes: the rows of the global batch as contiguous walks through an epoch's token stream. Pure: no state, no position.

Shapes: B lanes asked for, T window. The stream of an epoch is the documents, each ending in `<eos>`, in an order that
depends on (seed, epoch) only. Lane i of L walks the tokens [i*N//L, (i+1)*N//L) of its N tokens. At position p the
input is token p-1 and the target is token p, so every token is predicted exactly once. Where a lane begins the input is
`<eos>`, as where a document begins: a model that starts from nothing in the middle of a text, without the token it has
learned to start from, may not find its way back for thousands of tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from reprise.runtime import UserError

IGNORE = -100

Int64 = npt.NDArray[np.int64]


class TokenSource(Protocol):
    """What lanes need of a split: `TokenSplit` is one, and so is any pair of arrays."""

    @property
    def tokens(self) -> Any:
        """Ids; indexed by an int64 array of any shape, gives an array of that shape."""

    @property
    def doc_offsets(self) -> Int64:
        """[num_docs + 1] offsets into tokens; document d is tokens[doc_offsets[d] : doc_offsets[d + 1]]."""


@dataclass(frozen=True)
class Windows:
    """One step's batch. Past the end of a lane: targets are -100, tokens `<eos>`, resets false."""

    tokens_BT: Int64
    targets_BT: Int64
    reset_BT: npt.NDArray[np.bool_]


class LaneReader:
    """The windows of step s for any set of lanes; steps count on over epochs.

    `windows` and `num_targets` depend on their arguments only: a resumed run, or one with other ranks, reads the same.

    Raises UserError when the split has fewer tokens than lanes; `lanes_key` is the setting that it names.
    """

    def __init__(
        self,
        split: TokenSource,
        *,
        num_lanes: int,
        window: int,
        seed: int,
        eos_id: int,
        shuffle: bool = True,
        lanes_key: str = "data.num_lanes",
    ) -> None:
        assert num_lanes > 0 and window > 0, (num_lanes, window)
        self._tokens = split.tokens
        self._doc_offsets = np.asarray(split.doc_offsets, dtype=np.int64)
        self._seed = seed
        self._eos_id = eos_id
        self._shuffle = shuffle
        self.num_lanes = num_lanes
        self.window = window
        self.tokens_per_epoch = int(self._doc_offsets[-1])
        if self.tokens_per_epoch < num_lanes:
            raise UserError(
                f"{lanes_key}={num_lanes}: the split has {self.tokens_per_epoch} tokens, fewer than lanes; "
                f"use {lanes_key}={max(self.tokens_per_epoch, 1)} or less, or more text"
            )
        lane_bounds = [lane * self.tokens_per_epoch // num_lanes for lane in range(num_lanes + 1)]
        self._lane_starts = np.array(lane_bounds[:-1], dtype=np.int64)
        self._lane_stops = np.array(lane_bounds[1:], dtype=np.int64)
        longest = int((self._lane_stops - self._lane_starts).max())
        self.steps_per_epoch = -(-longest // window)
        # The last epoch asked for only. It is a function of the epoch, so nothing depends on the order of calls.
        self._order: tuple[int, Int64, Int64] | None = None

    def windows(self, step: int, lanes: Sequence[int]) -> Windows:
        """The window of `step` for `lanes`, in the order asked for: arrays [len(lanes), window]."""
        assert step >= 0 and all(0 <= lane < self.num_lanes for lane in lanes), (step, lanes)
        epoch, index = divmod(step, self.steps_per_epoch)
        rows = np.asarray(lanes, dtype=np.int64)
        first_B = self._lane_starts[rows] + index * self.window
        # One position more at the left, whose token is the first input.
        positions_BT = first_B[:, None] + np.arange(-1, self.window, dtype=np.int64)[None, :]
        inside_BT = positions_BT[:, 1:] < self._lane_stops[rows][:, None]
        stream_BT, begins_BT = self._stream(epoch, positions_BT)
        tokens_BT = np.where(inside_BT, stream_BT[:, :-1], self._eos_id)
        targets_BT = np.where(inside_BT, stream_BT[:, 1:], IGNORE)
        reset_BT = begins_BT[:, 1:] & inside_BT
        if index == 0:
            reset_BT[:, 0] = True
            tokens_BT[:, 0] = self._eos_id
        return Windows(tokens_BT=tokens_BT, targets_BT=targets_BT, reset_BT=reset_BT)

    def num_targets(self, step: int) -> int:
        """Targets of `step` that count, over all lanes."""
        index = step % self.steps_per_epoch
        left = self._lane_stops - self._lane_starts - index * self.window
        return int(np.clip(left, 0, self.window).sum())

    def _stream(self, epoch: int, positions_BT: Int64) -> tuple[Int64, npt.NDArray[np.bool_]]:
        """Tokens at positions of an epoch's stream (`<eos>` before the first), and whether a document begins there."""
        offsets, shifts = self._epoch_order(epoch)
        clipped_BT = np.clip(positions_BT, 0, self.tokens_per_epoch - 1)
        place_BT = np.searchsorted(offsets, clipped_BT, side="right") - 1
        tokens_BT = np.asarray(self._tokens[clipped_BT + shifts[place_BT]], dtype=np.int64)
        tokens_BT = np.where(positions_BT < 0, self._eos_id, tokens_BT)
        return tokens_BT, offsets[place_BT] == positions_BT

    def _epoch_order(self, epoch: int) -> tuple[Int64, Int64]:
        """Where each document of the epoch starts in its stream, and what to add to get to its place in the split."""
        if self._order is None or self._order[0] != epoch:
            starts = self._doc_offsets[:-1]
            lengths = np.diff(self._doc_offsets)
            # An empty document would share its start with the next one.
            assert (lengths > 0).all(), "documents end in <eos>, so none is empty"
            if self._shuffle:
                order = document_order(len(lengths), seed=self._seed, epoch=epoch)
                starts, lengths = starts[order], lengths[order]
            offsets = np.cumsum(lengths) - lengths
            self._order = (epoch, offsets, starts - offsets)
        return self._order[1], self._order[2]


def document_order(num_documents: int, *, seed: int, epoch: int) -> Int64:
    """A permutation of the documents that depends on (seed, epoch) only, in every version of numpy.

    Documents are sorted by a hash of (seed, epoch, document), since numpy promises no stable stream for `permutation`.
    """
    key = _mix(_mix(np.array([seed % 2**64], dtype=np.uint64)) + np.uint64(epoch))
    documents = np.arange(num_documents).astype(np.uint64)
    return np.argsort(_mix(key + documents), kind="stable").astype(np.int64)


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The splitmix64 step (Steele, Lea, Flood 2014): add the golden gamma, then finalise; wraps modulo 2**64."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
