"""The LSTM of `eager.py`: one autograd function for a window, forward and hand-derived backward.

Legend: B rows, T time, P time and the initial state before it, S steps of a chunk, D width, E input width, K units
that a unit hears from, X gates, G = X * D all gates side by side.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

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


class Lstm(torch.autograd.Function):
    """(x, h, c, reset, weights in the order of LstmWeights, coupled_gates, product) -> (y [B, T, D], h, c)."""

    @staticmethod
    def forward(
        ctx: Any,
        x_BTE: Tensor,
        hidden_BD: Tensor,
        cell_BD: Tensor,
        reset_BT: Tensor | None,
        input_GE: Tensor,
        recurrent_GK: Tensor,
        bias_G: Tensor,
        norm_scale_D: Tensor | None,
        norm_shift_D: Tensor | None,
        skip_scale_D: Tensor | None,
        coupled_gates: bool,
        product: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [B, T, E], h and c [B, D], reset [B, T] bool or None, weights [G, E], [G, K], [G], and vectors [D] or None.

        Returns y [B, T, D] in the format `product`, and h and c [B, D] after the last position in fp32 (fp64 where
        `product` is). Equations: `reference.lstm` (Hochreiter and Schmidhuber 1997). Raises UserError for a recurrent
        weight whose K is no structure.
        """
        kept = state_dtype(product)
        ctx.coupled_gates, ctx.product, ctx.resets = coupled_gates, product, Resets(reset_BT)
        ctx.dtypes = (x_BTE.dtype, hidden_BD.dtype, cell_BD.dtype, input_GE.dtype)
        drive = Drive(x_BTE, input_GE, bias_G, product)
        weight = recurrence(recurrent_GK, product, num_rows=x_BTE.shape[0], width=hidden_BD.shape[1])
        norm = Norm(norm_scale_D, norm_shift_D).to(kept)
        hidden = HiddenStates(hidden_BD.to(kept), norm, num_steps=x_BTE.shape[1], product=product)
        cells_PBD = torch.empty((x_BTE.shape[1] + 1, *cell_BD.shape), dtype=kept, device=x_BTE.device)
        cells_PBD[0].copy_(cell_BD)
        squashed_TBD = torch.empty_like(hidden.updates_TBD)
        skip = Skip(skip_scale_D, kept)
        _lstm_forward(
            drive, weight, hidden, cells_PBD, squashed_TBD, skip=skip, resets=ctx.resets, coupled_gates=coupled_gates
        )
        saved = (drive.x_TBE, drive.gates_TBG, cells_PBD, squashed_TBD, hidden.outputs_PBD, hidden.updates_TBD)
        ctx.save_for_backward(
            *saved, hidden.statistics(), input_GE, recurrent_GK, norm_scale_D, norm_shift_D, skip_scale_D
        )
        return hidden.outputs_PBD[1:].transpose(0, 1), hidden.last_BD.clone(), cells_PBD[-1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_BTD: Tensor, grad_hidden_BD: Tensor, grad_cell_BD: Tensor) -> tuple[Any, ...]:
        """From the gradients of y [B, T, D] and of the last h and c [B, D] those of all inputs, each in its own format.

        Backpropagation through time by hand: the cell's gradient takes the update's share, makes the gates', and goes
        on times f; the gates' make the previous hidden state's. The products that make x's and the weights' are left
        for the end, one for all steps.
        """
        x_TBE, gates_TBG, cells_PBD, squashed_TBD, outputs_PBD, updates_TBD, statistics, *weights = ctx.saved_tensors
        input_GE, recurrent_GK, norm_scale_D, norm_shift_D, skip_scale_D = weights
        x_dtype, hidden_dtype, cell_dtype, dtype = ctx.dtypes
        norm = Norm(norm_scale_D, norm_shift_D).to(updates_TBD.dtype)
        hidden = HiddenGradients(grad_y_BTD, updates_TBD, norm, statistics)
        weight = recurrence(recurrent_GK, ctx.product, num_rows=x_TBE.shape[1], width=updates_TBD.shape[-1])
        previous_cells_TBD, previous_TBD = ctx.resets.previous(cells_PBD), ctx.resets.previous(outputs_PBD)
        skip = Skip(skip_scale_D, updates_TBD.dtype)
        steps = _lstm_slopes(gates_TBG, previous_cells_TBD, squashed_TBD, coupled_gates=ctx.coupled_gates)
        grad_hidden_BD = grad_hidden_BD.to(updates_TBD.dtype, copy=True)
        grad_cell_BD = grad_cell_BD.to(updates_TBD.dtype, copy=True)
        grad_gates_TBG = torch.empty_like(gates_TBG, dtype=ctx.product)
        width = updates_TBD.shape[-1]
        grad_blocks_TBXD = grad_gates_TBG.view(*x_TBE.shape[:2], grad_gates_TBG.shape[-1] // width, width)
        grad_gates = grad_gates_TBG.unbind(0)
        grad_outputs, grad_others = grad_blocks_TBXD[:, :, 0].unbind(0), grad_blocks_TBXD[:, :, 1:].unbind(0)
        for t, slopes in steps:
            grad_update_BD = hidden.at(t, grad_hidden_BD)
            grad_cell_BD.addcmul_(grad_update_BD, slopes.cell_BD)
            torch.mul(grad_update_BD, slopes.output_BD, out=grad_outputs[t])
            torch.mul(grad_cell_BD.unsqueeze(1), slopes.others_BXD, out=grad_others[t])
            grad_cell_BD.mul_(slopes.forget_BD)
            product_BD = weight.back(grad_gates[t])
            if skip.is_on:
                skip.pass_back(grad_update_BD, previous_TBD[t], out=grad_hidden_BD)
                grad_hidden_BD.add_(product_BD)
            else:
                grad_hidden_BD.copy_(product_BD)
            if t in ctx.resets.steps:
                grad_hidden_BD = ctx.resets.cleared(grad_hidden_BD, t)
                grad_cell_BD = ctx.resets.cleared(grad_cell_BD, t)
        return (
            input_gradient(grad_gates_TBG, input_GE, x_dtype) if ctx.needs_input_grad[0] else None,
            grad_hidden_BD.to(hidden_dtype),
            grad_cell_BD.to(cell_dtype),
            None,
            weight_gradient(grad_gates_TBG, x_TBE, dtype),
            weight.gradient(grad_gates_TBG, previous_TBD, dtype),
            bias_gradient(grad_gates_TBG, dtype),
            *hidden.norm_gradients(),
            skip.gradient(),
            None,
            None,
        )


def _lstm_forward(
    drive: Drive,
    weight: Recurrence,
    hidden: HiddenStates,
    cells_PBD: Tensor,
    squashed_TBD: Tensor,
    *,
    skip: Skip,
    resets: Resets,
    coupled_gates: bool,
) -> None:
    """All steps of one window. The drive is overwritten by the gates' values."""
    gates_TBG, width = drive.gates_TBG, cells_PBD.shape[-1]
    blocks = [block.unbind(0) for block in gates_TBG.chunk(gates_TBG.shape[-1] // width, dim=-1)]
    outputs, forgets, inputs, candidates = blocks[0], blocks[1], blocks[-2], blocks[-1]
    sigmoids = gates_TBG[..., :-width].unbind(0)
    gates, cells, squashed, updates = (
        part.unbind(0) for part in (gates_TBG, cells_PBD, squashed_TBD, hidden.updates_TBD)
    )
    hidden_BD, read_BD, cell_BD = hidden.last_BD, hidden.outputs_PBD[0], cells[0]
    for t in range(len(gates)):
        if t in resets.steps:
            hidden_BD, read_BD, cell_BD = (resets.cleared(part, t) for part in (hidden_BD, read_BD, cell_BD))
        drive.prepare(t)
        gates[t].add_(weight.share(hidden_BD, read_BD))
        sigmoids[t].sigmoid_()
        squash(candidates[t], out=candidates[t])
        if coupled_gates:
            cell_BD = torch.lerp(candidates[t], cell_BD, forgets[t], out=cells[t + 1])
        else:
            cell_BD = torch.mul(forgets[t], cell_BD, out=cells[t + 1]).addcmul_(inputs[t], candidates[t])
        squash(cell_BD, out=squashed[t])
        torch.mul(outputs[t], squashed[t], out=updates[t])
        skip.add(hidden_BD, to=updates[t])
        hidden_BD, read_BD = hidden.finish(t)


class _Slopes(NamedTuple):
    """Local derivatives at one step: of the update by the cell and by the output gate, of the cell by what makes it."""

    cell_BD: Tensor
    output_BD: Tensor
    others_BXD: Tensor
    forget_BD: Tensor


def _lstm_slopes(
    gates_TBG: Tensor, previous_cells_TBD: Tensor, squashed_TBD: Tensor, *, coupled_gates: bool
) -> Iterator[tuple[int, _Slopes]]:
    """(t, slopes) from the last step to the first. Gate slopes are those of the gates before sigmoid and tanh."""
    num_steps, num_rows, width = squashed_TBD.shape
    for start, stop in chunks(num_steps, num_rows * width):
        blocks = gates_TBG[start:stop].chunk(gates_TBG.shape[-1] // width, dim=-1)
        output_SBD, forget_SBD, input_SBD, candidate_SBD = blocks[0], blocks[1], blocks[-2], blocks[-1]
        previous_SBD, squashed_SBD = previous_cells_TBD[start:stop], squashed_TBD[start:stop]
        slopes_SBXD = gates_TBG.new_empty((stop - start, num_rows, len(blocks) - 1, width))
        if coupled_gates:
            previous_SBD = previous_SBD - candidate_SBD
            input_SBD = 1.0 - forget_SBD
        else:
            slopes_SBXD[:, :, 1] = _sigmoid_backward(candidate_SBD, input_SBD)
        slopes_SBXD[:, :, 0] = _sigmoid_backward(previous_SBD, forget_SBD)
        slopes_SBXD[:, :, -1] = _tanh_backward(input_SBD, candidate_SBD)
        cell_SBD = _tanh_backward(output_SBD, squashed_SBD)
        output_slope_SBD = _sigmoid_backward(squashed_SBD, output_SBD)
        rows = zip(cell_SBD, output_slope_SBD, slopes_SBXD, forget_SBD, strict=True)
        for offset, parts in reversed(list(enumerate(rows))):
            yield start + offset, _Slopes(*parts)
