"""What the eager cells share for one window of time steps: the input's drive, resets, the hidden state and gradients.

Every cell here ends a step in the same way (skip between time steps, then norm) and starts backward in the same way, so
a variant of the hidden state (another norm, a scale on the skip) changes this file and `reference._hidden`, and for the
fast paths `csrc/forward.h`, `csrc/backward.h` and `tritonsrc/`.

Legend: B rows, T time, P time and the initial state before it (T + 1), S steps computed at once, N = T * B, D width,
E input width, K inputs of a product, G all gates.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from reprise.kernels.products import PackedWeight, state_dtype
from reprise.kernels.reference import NORM_EPSILON

_layer_norm_backward = torch.ops.aten.native_layer_norm_backward

# Rows (steps times rows of the batch) whose drive is computed at once: enough for a product to run at full speed.
_AHEAD_ROWS = 256

# Elements of one gate in a chunk of steps: half a MiB in fp32, which stays in a core's cache.
_CHUNK_ELEMENTS = 1 << 17


def chunks(num_steps: int, elements_a_step: int) -> Iterator[tuple[int, int]]:
    """[start, stop) of chunks of steps that stay in cache, last chunk first."""
    length = max(1, _CHUNK_ELEMENTS // max(1, elements_a_step))
    for stop in range(num_steps, 0, -length):
        yield max(0, stop - length), stop


class Resets:
    """Rows that start anew inside a window. Only the positions where some row does pay for it."""

    def __init__(self, reset_BT: Tensor | None) -> None:
        self.steps: frozenset[int] = frozenset()
        self._mask_TB1: Tensor | None = None
        if reset_BT is not None:
            self.steps = frozenset(reset_BT.any(dim=0).nonzero().flatten().tolist())
            self._mask_TB1 = reset_BT.t().unsqueeze(-1).contiguous()

    def cleared(self, part_BD: Tensor, t: int) -> Tensor:
        """The part of the state that step `t` reads: zero in the rows that start anew there."""
        assert self._mask_TB1 is not None
        return part_BD.masked_fill(self._mask_TB1[t], 0.0)

    def previous(self, parts_PBD: Tensor) -> Tensor:
        """For every position the part of the state that it read, [T, B, D], from the parts after every position."""
        previous_TBD = parts_PBD[:-1]
        if self._mask_TB1 is None or not self.steps:
            return previous_TBD
        return previous_TBD.masked_fill(self._mask_TB1, 0.0)


class Norm(NamedTuple):
    """The layer norm's parameters in the kept format; both None where there is no norm."""

    scale_D: Tensor | None
    shift_D: Tensor | None

    def to(self, kept: torch.dtype) -> "Norm":
        return Norm(*(None if part is None else part.to(kept) for part in self))


class Skip:
    """The temporal residual: a learned share of the previous hidden state in the update, or nothing."""

    def __init__(self, scale_D: Tensor | None, kept: torch.dtype) -> None:
        self.is_on = scale_D is not None
        if scale_D is not None:
            self._scale_D = scale_D.to(kept)
            self._dtype = scale_D.dtype
        self._grad_scale_BD: Tensor | None = None

    def add(self, previous_BD: Tensor, *, to: Tensor) -> None:
        """Add the previous hidden state's share to an update [B, D], in place."""
        if self.is_on:
            to.addcmul_(previous_BD, self._scale_D)

    def pass_back(self, grad_update_BD: Tensor, previous_BD: Tensor, *, out: Tensor) -> None:
        """The previous state's gradient through the skip into `out`, which may be `grad_update_BD` itself."""
        if self._grad_scale_BD is None:
            self._grad_scale_BD = torch.zeros_like(grad_update_BD)
        self._grad_scale_BD.addcmul_(grad_update_BD, previous_BD.to(grad_update_BD.dtype))
        torch.mul(grad_update_BD, self._scale_D, out=out)

    def gradient(self) -> Tensor | None:
        """Gradient of the scale [D] over the steps passed back."""
        return None if self._grad_scale_BD is None else self._grad_scale_BD.sum(dim=0).to(self._dtype)


class HiddenStates:
    """The hidden states of a window as they are produced: outputs in the products' format, updates before the norm."""

    def __init__(self, initial_BD: Tensor, norm: Norm, *, num_steps: int, product: torch.dtype) -> None:
        num_rows, width = initial_BD.shape
        self._norm = norm
        self._shape = (width,)
        self.last_BD = initial_BD.to(state_dtype(product))
        self.outputs_PBD = initial_BD.new_empty((num_steps + 1, num_rows, width), dtype=product)
        self.outputs_PBD[0].copy_(initial_BD)
        self.updates_TBD = initial_BD.new_empty((num_steps, num_rows, width), dtype=state_dtype(product))
        self._outputs, self._updates = self.outputs_PBD.unbind(0), self.updates_TBD.unbind(0)
        self._statistics: list[tuple[Tensor, Tensor]] = []

    def finish(self, t: int) -> tuple[Tensor, Tensor]:
        """Step t's hidden state [B, D] from its update: in the kept format, and as the next product reads it."""
        hidden_BD = self._updates[t]
        if self._norm.scale_D is not None:
            hidden_BD, mean_B1, inverse_deviation_B1 = torch.native_layer_norm(
                hidden_BD, self._shape, self._norm.scale_D, self._norm.shift_D, NORM_EPSILON
            )
            self._statistics.append((mean_B1, inverse_deviation_B1))
        self.last_BD = hidden_BD
        return hidden_BD, self._outputs[t + 1].copy_(hidden_BD)

    def statistics(self) -> Tensor | None:
        """Mean and inverse deviation of every norm taken, [2, T, B, 1]."""
        if not self._statistics:
            return None
        means, inverse_deviations = zip(*self._statistics, strict=True)
        return torch.stack((torch.stack(means), torch.stack(inverse_deviations)))


class HiddenGradients:
    """Backward of `HiddenStates.finish`, last step first."""

    def __init__(self, grad_y_BTD: Tensor, updates_TBD: Tensor, norm: Norm, statistics_2TB1: Tensor | None) -> None:
        self._norm = norm
        self._shape = updates_TBD.shape[-1:]
        self._grad_y = grad_y_BTD.transpose(0, 1).unbind(0)
        self._updates_TBD = updates_TBD
        self._updates = updates_TBD.unbind(0)
        self._statistics_2TB1 = statistics_2TB1
        if statistics_2TB1 is not None:
            self._means, self._inverse_deviations = statistics_2TB1[0].unbind(0), statistics_2TB1[1].unbind(0)
            self._grad_hidden_TBD = torch.empty_like(updates_TBD)
            self._grad_hidden = self._grad_hidden_TBD.unbind(0)

    def at(self, t: int, grad_hidden_BD: Tensor) -> Tensor:
        """The gradient of step t's update [B, D], from what later steps say about the hidden state (overwritten)."""
        if self._statistics_2TB1 is None:
            return grad_hidden_BD.add_(self._grad_y[t])
        total_BD = torch.add(grad_hidden_BD, self._grad_y[t], out=self._grad_hidden[t])
        grad_update_BD: Tensor = _layer_norm_backward(
            total_BD,
            self._updates[t],
            self._shape,
            self._means[t],
            self._inverse_deviations[t],
            self._norm.scale_D,
            self._norm.shift_D,
            (True, False, False),
        )[0]
        return grad_update_BD

    def norm_gradients(self) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of the norm's scale and shift [D], one pass over the whole window."""
        if self._statistics_2TB1 is None:
            return None, None
        mean_N1, inverse_deviation_N1 = self._statistics_2TB1.flatten(1, 2).unbind(0)
        _, grad_scale_D, grad_shift_D = _layer_norm_backward(
            self._grad_hidden_TBD.flatten(0, 1),
            self._updates_TBD.flatten(0, 1),
            self._shape,
            mean_N1,
            inverse_deviation_N1,
            self._norm.scale_D,
            self._norm.shift_D,
            (False, True, True),
        )
        return grad_scale_D, grad_shift_D


class Drive:
    """The input's share of all gates, computed a few steps ahead of the loop so that it is still in cache when used.

    `gates_TBG` is in the kept format. After `prepare(t)` its row t holds the drive, for the caller to overwrite.
    """

    def __init__(self, x_BTE: Tensor, input_GE: Tensor, bias_G: Tensor, product: torch.dtype) -> None:
        self.x_TBE = x_BTE.transpose(0, 1).to(product).contiguous()
        num_steps, num_rows, _ = self.x_TBE.shape
        kept = state_dtype(product)
        self.gates_TBG = x_BTE.new_empty((num_steps, num_rows, input_GE.shape[0]), dtype=kept)
        self._bias_G = bias_G.to(kept)
        self._num_ahead = max(1, _AHEAD_ROWS // max(1, num_rows))
        self._weight = PackedWeight(input_GE, product, num_rows=self._num_ahead * num_rows)

    def prepare(self, t: int) -> None:
        """Make row t hold the drive; steps are asked for in order from 0."""
        if t % self._num_ahead == 0:
            ahead = slice(t, t + self._num_ahead)
            shares_NG = self._weight.times(self.x_TBE[ahead].flatten(0, 1))
            gates_SBG = self.gates_TBG[ahead]
            gates_SBG.copy_(shares_NG.view(gates_SBG.shape)).add_(self._bias_G)


def squash(x: Tensor, out: Tensor) -> Tensor:
    """tanh(x) into `out`, which may be `x` itself.

    On CPU torch's tanh takes five times as long as its sigmoid, so tanh(x) = 2 sigmoid(2 x) - 1 is taken: the same to
    one part in 10^7 of the largest value, which is 1.
    """
    if x.is_cpu:
        return torch.mul(x, 2.0, out=out).sigmoid_().mul_(2.0).sub_(1.0)
    return torch.tanh(x, out=out)


def input_gradient(grad_gates_TBG: Tensor, input_GE: Tensor, dtype: torch.dtype) -> Tensor:
    """Gradient of x [B, T, E], one product for the whole window."""
    num_steps, num_rows, _ = grad_gates_TBG.shape
    weight = PackedWeight(input_GE.t(), grad_gates_TBG.dtype, num_rows=num_steps * num_rows)
    grad_x_NE = weight.times(grad_gates_TBG.flatten(0, 1))
    return grad_x_NE.view(num_steps, num_rows, grad_x_NE.shape[-1]).transpose(0, 1).to(dtype)


def weight_gradient(grad_gates_TBG: Tensor, read_TBK: Tensor, dtype: torch.dtype) -> Tensor:
    """Gradient [G, K] of the weight that multiplied `read`, one product for the whole window."""
    return torch.mm(grad_gates_TBG.flatten(0, 1).t(), read_TBK.flatten(0, 1)).to(dtype)


def bias_gradient(grad_gates_TBG: Tensor, dtype: torch.dtype) -> Tensor:
    """Gradient [G] of a bias. A product with ones, which sums in fp32: a plain sum would first copy all to fp32."""
    grad_gates_NG = grad_gates_TBG.flatten(0, 1)
    return torch.mm(grad_gates_NG.new_ones(1, grad_gates_NG.shape[0]), grad_gates_NG)[0].to(dtype)
