"""The recurrent product of the eager cells in its three structures: forward, backward and the weight's gradient.

What each structure computes is in `reference.py`. Here each is laid out for speed once a window: a packed matrix for
full, one batched product over heads for block, an elementwise multiply for diagonal.

Legend: B rows, T time, N = T * B, D width, H heads, K units that a unit hears from, X gates, G = X * D all gates side
by side, C = X * K all gates of one head side by side.
"""

from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from reprise.kernels.products import PackedWeight, recurrence_structure, state_dtype
from reprise.kernels.window import chunks, weight_gradient


class Recurrence(Protocol):
    """A recurrent weight as the loops over time use it."""

    def share(self, hidden_BD: Tensor, read_BD: Tensor) -> Tensor:
        """The previous hidden state's share of all gates [B, G]: R h of `reference.py`.

        The state [B, D] comes twice: in the kept format, and as matrix products read it.
        """

    def back(self, grad_gates_BG: Tensor) -> Tensor:
        """The gradient of the previous hidden state [B, D] from that of its share [B, G], in the products' format."""

    def gradient(self, grad_gates_TBG: Tensor, previous_TBD: Tensor, dtype: torch.dtype) -> Tensor:
        """Gradient of the weight [G, K] in the format `dtype`, summed over a window.

        From the gradients of the shares [T, B, G] and the hidden states [T, B, D] that they were made from, both in the
        products' format.
        """


def recurrence(recurrent_GK: Tensor, product: torch.dtype, *, num_rows: int, width: int) -> Recurrence:
    """The weight in the structure that its shape says. Raises UserError for a shape that is none."""
    structure = recurrence_structure(recurrent_GK, width)
    if structure == "full":
        return _Full(recurrent_GK, product, num_rows)
    if structure == "block":
        return _Block(recurrent_GK, product, width)
    return _Diagonal(recurrent_GK, product, width)


class _Full:
    """A unit hears all units: one matrix."""

    def __init__(self, recurrent_GD: Tensor, product: torch.dtype, num_rows: int) -> None:
        self._weight_GD, self._product, self._num_rows = recurrent_GD, product, num_rows

    @cached_property
    def _forward(self) -> PackedWeight:
        return PackedWeight(self._weight_GD, self._product, num_rows=self._num_rows)

    @cached_property
    def _backward(self) -> PackedWeight:
        return PackedWeight(self._weight_GD.t(), self._product, num_rows=self._num_rows)

    def share(self, hidden_BD: Tensor, read_BD: Tensor) -> Tensor:
        return self._forward.times(read_BD)

    def back(self, grad_gates_BG: Tensor) -> Tensor:
        return self._backward.times(grad_gates_BG)

    def gradient(self, grad_gates_TBG: Tensor, previous_TBD: Tensor, dtype: torch.dtype) -> Tensor:
        return weight_gradient(grad_gates_TBG, previous_TBD, dtype)


class _Block:
    """A unit hears the units of its head: one matrix a head, multiplied as a batch.

    At 32 rows and 4 heads of 128 units the batch takes two thirds of the time of a packed weight a head, in fp32 and
    bf16 (one core with AVX-512).
    """

    def __init__(self, recurrent_GK: Tensor, product: torch.dtype, width: int) -> None:
        self._heard = recurrent_GK.shape[1]
        self._num_heads = width // self._heard
        self._num_gates = recurrent_GK.shape[0] // width
        weight_XHKK = (
            recurrent_GK.detach().to(product).reshape(self._num_gates, self._num_heads, self._heard, self._heard)
        )
        self._weight_HCK = weight_XHKK.transpose(0, 1).flatten(1, 2).contiguous()

    def share(self, hidden_BD: Tensor, read_BD: Tensor) -> Tensor:
        num_rows = read_BD.shape[0]
        read_HBK = read_BD.view(num_rows, self._num_heads, self._heard).transpose(0, 1)
        share_HBC = torch.bmm(read_HBK, self._weight_HCK.transpose(1, 2))
        share_HBXK = share_HBC.view(self._num_heads, num_rows, self._num_gates, self._heard)
        return share_HBXK.permute(1, 2, 0, 3).flatten(1)

    def back(self, grad_gates_BG: Tensor) -> Tensor:
        grad_BXHK = grad_gates_BG.view(grad_gates_BG.shape[0], self._num_gates, self._num_heads, self._heard)
        grad_HBC = grad_BXHK.permute(2, 0, 1, 3).flatten(2)
        return torch.bmm(grad_HBC, self._weight_HCK).transpose(0, 1).flatten(1)

    def gradient(self, grad_gates_TBG: Tensor, previous_TBD: Tensor, dtype: torch.dtype) -> Tensor:
        num_shares = grad_gates_TBG.shape[0] * grad_gates_TBG.shape[1]
        grad_NXHK = grad_gates_TBG.reshape(num_shares, self._num_gates, self._num_heads, self._heard)
        previous_NHK = previous_TBD.reshape(num_shares, self._num_heads, self._heard)
        return torch.einsum("nxhd,nhk->xhdk", grad_NXHK, previous_NHK).reshape(-1, self._heard).to(dtype)


class _Diagonal:
    """A unit hears itself: no matrix, so everything stays in the kept format."""

    def __init__(self, recurrent_G1: Tensor, product: torch.dtype, width: int) -> None:
        self._weight_XD = recurrent_G1.detach().to(state_dtype(product)).reshape(-1, width)

    def share(self, hidden_BD: Tensor, read_BD: Tensor) -> Tensor:
        return torch.mul(self._weight_XD, hidden_BD.unsqueeze(1)).flatten(1)

    def back(self, grad_gates_BG: Tensor) -> Tensor:
        return torch.mul(self._weight_XD, grad_gates_BG.view(-1, *self._weight_XD.shape)).sum(dim=1)

    def gradient(self, grad_gates_TBG: Tensor, previous_TBD: Tensor, dtype: torch.dtype) -> Tensor:
        total_XD = torch.zeros_like(self._weight_XD)
        num_steps, num_rows, num_gate_units = grad_gates_TBG.shape
        for start, stop in chunks(num_steps, num_rows * num_gate_units):
            grad_NXD = grad_gates_TBG[start:stop].reshape(-1, *total_XD.shape).to(total_XD.dtype)
            total_XD += (grad_NXD * previous_TBD[start:stop].flatten(0, 1).unsqueeze(1)).sum(dim=0)
        return total_XD.reshape(-1, 1).to(dtype)
