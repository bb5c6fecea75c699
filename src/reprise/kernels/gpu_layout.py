"""What a window of a recurrent cell on a GPU is made from, and how units, heads and gates lie in memory.

Columns of gates are ordered head by head, so that a block recurrence is a plain batch of products; with one head that
is the order of the weights themselves.

Legend: B rows, T time, N = T * B, D width, E input width, H heads, K units that a unit hears from, X gates, C = X * K
all gates of one head side by side, G = H * C = X * D all gates.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from reprise.kernels.products import recurrence_structure

NUM_GATES = {"lstm": 4, "coupled_lstm": 3, "gru": 3}


class CellInputs(NamedTuple):
    """What a window is made from, but for the state that it starts with. Only a GRU has a candidate bias."""

    x_BTE: Tensor
    reset_BT: Tensor | None
    input_GE: Tensor
    recurrent_GK: Tensor
    bias_G: Tensor
    candidate_bias_D: Tensor | None
    norm_scale_D: Tensor | None
    norm_shift_D: Tensor | None
    skip_scale_D: Tensor | None
    kind: str
    product: torch.dtype


class Saved(NamedTuple):
    """What backward reads: gates, what each position read, and the norm's mean and inverse deviation.

    `memories` is the cell that a position of an LSTM read, or what the reset gate of a GRU multiplied. Without elements
    where there is no such thing, or no backward.
    """

    gates_TBG: Tensor
    reads_TBD: Tensor
    memories_TBD: Tensor
    statistics_TB2: Tensor


@dataclass(frozen=True)
class Layout:
    """How units, heads and gates lie in memory."""

    num_rows: int
    width: int
    num_gates: int
    # K; the width where the recurrence is diagonal.
    heard: int
    is_diagonal: bool
    has_norm: bool

    @classmethod
    def of(cls, inputs: CellInputs) -> "Layout":
        """Raises UserError for a recurrent weight of a shape that is none of the three structures."""
        num_gates = NUM_GATES[inputs.kind]
        num_rows, width = inputs.x_BTE.shape[0], inputs.recurrent_GK.shape[0] // num_gates
        is_diagonal = recurrence_structure(inputs.recurrent_GK, width) == "diagonal"
        heard = width if is_diagonal else inputs.recurrent_GK.shape[1]
        return cls(num_rows, width, num_gates, heard, is_diagonal, inputs.norm_scale_D is not None)

    @property
    def num_heads(self) -> int:
        """H, 1 unless the recurrence is block."""
        return self.width // self.heard

    def by_head(self, weight_GE: Tensor) -> Tensor:
        """Rows in the order of gates, then units, put in the order of heads, then gates, then units: [H, C, ...]."""
        parts_XHK = weight_GE.reshape(self.num_gates, self.num_heads, self.heard, *weight_GE.shape[1:])
        return parts_XHK.transpose(0, 1).flatten(1, 2)

    def by_gate(self, weight_HCE: Tensor) -> Tensor:
        """The inverse of `by_head`: [G, ...]."""
        parts_HXK = weight_HCE.reshape(self.num_heads, self.num_gates, self.heard, *weight_HCE.shape[2:])
        return parts_HXK.transpose(0, 1).flatten(0, 2)

    def share_shape(self, num_gates: int) -> tuple[int, int, int]:
        """[H, B, K] for each of `num_gates` side by side."""
        return self.num_heads, self.num_rows, num_gates * self.heard

    def heads_first(self, part_NG: Tensor) -> Tensor:
        """[N, H * anything] as [H, N, anything], a view."""
        return part_NG.view(len(part_NG), self.num_heads, part_NG.shape[1] // self.num_heads).transpose(0, 1)
