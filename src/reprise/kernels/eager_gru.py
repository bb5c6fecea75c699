"""The GRU of `eager.py`: one autograd function for a window, forward and hand-derived backward.

Legend: B rows, T time, P time and the initial state before it, S steps of a chunk, D width, E input width, K units
that a unit hears from, X gates, F = 4 * D, G = X * D all gates side by side.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from reprise.kernels.eager_recurrence import Recurrence, recurrence
from reprise.kernels.products import state_dtype
from reprise.kernels.window import (
    Drive,
    HiddenGradients,
    HiddenStates,
    Norm,
    Resets,
    Skip,
    bias_gradient,
    chunks,
    input_gradient,
    squash,
    weight_gradient,
)

_sigmoid_backward = torch.ops.aten.sigmoid_backward
_tanh_backward = torch.ops.aten.tanh_backward


class Gru(torch.autograd.Function):
    """(x, h, reset, weights in the order of GruWeights, product) -> (y [B, T, D], h)."""

    @staticmethod
    def forward(
        ctx: Any,
        x_BTE: Tensor,
        hidden_BD: Tensor,
        reset_BT: Tensor | None,
        input_GE: Tensor,
        recurrent_GK: Tensor,
        bias_G: Tensor,
        candidate_bias_D: Tensor,
        norm_scale_D: Tensor | None,
        norm_shift_D: Tensor | None,
        skip_scale_D: Tensor | None,
        product: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """x [B, T, E], h [B, D], reset [B, T] bool or None, weights [G, E], [G, K], [G], and vectors [D] or None.

        Returns y [B, T, D] in the format `product`, and h [B, D] after the last position in fp32 (fp64 where `product`
        is). Equations: `reference.gru` (Cho et al. 2014). Raises UserError for a recurrent weight whose K is no
        structure.
        """
        kept = state_dtype(product)
        ctx.product, ctx.resets = product, Resets(reset_BT)
        ctx.dtypes = (x_BTE.dtype, hidden_BD.dtype, input_GE.dtype)
        drive = Drive(x_BTE, input_GE, bias_G, product)
        weight = recurrence(recurrent_GK, product, num_rows=x_BTE.shape[0], width=hidden_BD.shape[1])
        norm = Norm(norm_scale_D, norm_shift_D).to(kept)
        hidden = HiddenStates(hidden_BD.to(kept), norm, num_steps=x_BTE.shape[1], product=product)
        skip = Skip(skip_scale_D, kept)
        recalled_TBD = _gru_forward(drive, weight, hidden, candidate_bias_D.to(kept), skip=skip, resets=ctx.resets)
        saved = (drive.x_TBE, drive.gates_TBG, recalled_TBD, hidden.outputs_PBD, hidden.updates_TBD)
        ctx.save_for_backward(
            *saved, hidden.statistics(), input_GE, recurrent_GK, norm_scale_D, norm_shift_D, skip_scale_D
        )
        return hidden.outputs_PBD[1:].transpose(0, 1), hidden.last_BD.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_BTD: Tensor, grad_hidden_BD: Tensor) -> tuple[Any, ...]:
        """From the gradients of y [B, T, D] and of the last h [B, D] those of all inputs, each in its own format.

        Backpropagation through time by hand: the update's gradient times its slopes makes those of n, r, z and of what
        the reset gate multiplies, which make the previous hidden state's together with the share that z keeps. The
        products that make x's and the weights' are left for the end, one for all steps.
        """
        x_TBE, gates_TBG, recalled_TBD, outputs_PBD, updates_TBD, statistics, *weights = ctx.saved_tensors
        input_GE, recurrent_GK, norm_scale_D, norm_shift_D, skip_scale_D = weights
        x_dtype, hidden_dtype, dtype = ctx.dtypes
        width = updates_TBD.shape[-1]
        norm = Norm(norm_scale_D, norm_shift_D).to(updates_TBD.dtype)
        hidden = HiddenGradients(grad_y_BTD, updates_TBD, norm, statistics)
        weight = recurrence(recurrent_GK, ctx.product, num_rows=x_TBE.shape[1], width=updates_TBD.shape[-1])
        previous_TBD = ctx.resets.previous(outputs_PBD)
        # Four blocks a row, n r z c: the input's product sees n r z, the recurrent one r z c, both without a copy.
        grad_blocks_TBXD = torch.empty((*x_TBE.shape[:2], 4, width), dtype=ctx.product, device=x_TBE.device)
        grad_blocks_TBF = grad_blocks_TBXD.flatten(2)
        grad_blocks, grad_recurrents = grad_blocks_TBXD.unbind(0), grad_blocks_TBF[..., width:].unbind(0)
        grad_hidden_BD = grad_hidden_BD.to(updates_TBD.dtype, copy=True)
        skip = Skip(skip_scale_D, updates_TBD.dtype)
        skipped_BD = torch.empty_like(grad_hidden_BD)
        for t, slopes_BXD, kept_BD in _gru_slopes(gates_TBG, previous_TBD, recalled_TBD):
            grad_update_BD = hidden.at(t, grad_hidden_BD)
            torch.mul(grad_update_BD.unsqueeze(1), slopes_BXD, out=grad_blocks[t])
            if skip.is_on:
                skip.pass_back(grad_update_BD, previous_TBD[t], out=skipped_BD)
            torch.mul(grad_update_BD, kept_BD, out=grad_hidden_BD).add_(weight.back(grad_recurrents[t]))
            if skip.is_on:
                grad_hidden_BD.add_(skipped_BD)
            if t in ctx.resets.steps:
                grad_hidden_BD = ctx.resets.cleared(grad_hidden_BD, t)
        grad_gates_TBG, grad_recurrent_TBG = grad_blocks_TBF[..., :-width], grad_blocks_TBF[..., width:]
        rolled_GE = input_GE.roll(width, 0)
        return (
            input_gradient(grad_gates_TBG, rolled_GE, x_dtype) if ctx.needs_input_grad[0] else None,
            grad_hidden_BD.to(hidden_dtype),
            None,
            weight_gradient(grad_gates_TBG, x_TBE, dtype).roll(-width, 0),
            weight.gradient(grad_recurrent_TBG, previous_TBD, dtype),
            bias_gradient(grad_gates_TBG, dtype).roll(-width, 0),
            bias_gradient(grad_recurrent_TBG[..., -width:], dtype),
            *hidden.norm_gradients(),
            skip.gradient(),
            None,
        )


def _gru_forward(
    drive: Drive,
    weight: Recurrence,
    hidden: HiddenStates,
    candidate_bias_D: Tensor,
    *,
    skip: Skip,
    resets: Resets,
) -> Tensor:
    """All steps of one window. The drive is overwritten by the gates' values.

    Returns what the reset gate multiplied, [T, B, D].
    """
    gates_TBG, width = drive.gates_TBG, candidate_bias_D.shape[0]
    recalled_TBD = torch.empty_like(hidden.updates_TBD)
    resetting, keeping, candidates = (block.unbind(0) for block in gates_TBG.chunk(3, dim=-1))
    sigmoids = gates_TBG[..., :-width].unbind(0)
    recalled, updates = recalled_TBD.unbind(0), hidden.updates_TBD.unbind(0)
    hidden_BD, read_BD = hidden.last_BD, hidden.outputs_PBD[0]
    for t in range(len(updates)):
        if t in resets.steps:
            hidden_BD, read_BD = resets.cleared(hidden_BD, t), resets.cleared(read_BD, t)
        drive.prepare(t)
        sigmoid_share_BS, candidate_share_BD = weight.share(hidden_BD, read_BD).split_with_sizes(
            (2 * width, width), dim=-1
        )
        sigmoids[t].add_(sigmoid_share_BS).sigmoid_()
        torch.add(candidate_bias_D, candidate_share_BD, out=recalled[t])
        squash(candidates[t].addcmul_(resetting[t], recalled[t]), out=candidates[t])
        torch.lerp(candidates[t], hidden_BD, keeping[t], out=updates[t])
        skip.add(hidden_BD, to=updates[t])
        hidden_BD, read_BD = hidden.finish(t)
    return recalled_TBD


def _gru_slopes(gates_TBG: Tensor, previous_TBD: Tensor, recalled_TBD: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(t, slopes [B, 4, D], kept [B, D]) from the last step to the first.

    Slopes of the update by the sums inside tanh and sigmoid of n, r and z, and by what the reset gate multiplies;
    `kept` is the slope by the previous hidden state where it enters the update directly.
    """
    num_steps, num_rows, width = recalled_TBD.shape
    for start, stop in chunks(num_steps, num_rows * width):
        resetting_SBD, keeping_SBD, candidate_SBD = gates_TBG[start:stop].chunk(3, dim=-1)
        slopes_SBXD = gates_TBG.new_empty((stop - start, num_rows, 4, width))
        candidate_slope_SBD = _tanh_backward(1.0 - keeping_SBD, candidate_SBD)
        slopes_SBXD[:, :, 0] = candidate_slope_SBD
        slopes_SBXD[:, :, 1] = _sigmoid_backward(candidate_slope_SBD * recalled_TBD[start:stop], resetting_SBD)
        slopes_SBXD[:, :, 2] = _sigmoid_backward(previous_TBD[start:stop] - candidate_SBD, keeping_SBD)
        torch.mul(candidate_slope_SBD, resetting_SBD, out=slopes_SBXD[:, :, 3])
        for offset in reversed(range(stop - start)):
            yield start + offset, slopes_SBXD[offset], keeping_SBD[offset]
