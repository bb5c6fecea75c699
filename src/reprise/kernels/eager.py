"""Recurrent cells with a hand-derived backward in plain PyTorch operations: no compiler needed, every device.

The names, signatures and results are those of `reference.py`. Where the time goes, and what is done about it:

- the input's share of all gates is one product over the whole window, and so are the weight gradients;
- a time step is one product with a weight laid out once (`products.PackedWeight`) and a handful of fused operations
  that write into buffers allocated once a window;
- backward multiplies incoming gradients by local slopes, which are computed for several steps at once while they are
  still in cache, so that a step of backward holds no transcendental function and few operations.

Legend: B rows, T time, P time and the initial state before it, K steps of a chunk, D width, E input width, G all gates.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from reprise.kernels.products import PackedWeight, product_dtype, state_dtype
from reprise.kernels.reference import GruWeights, LstmWeights, State
from reprise.kernels.window import (
    Drive,
    HiddenGradients,
    HiddenStates,
    Norm,
    Resets,
    Skip,
    bias_gradient,
    input_gradient,
    squash,
    weight_gradient,
)

_sigmoid_backward = torch.ops.aten.sigmoid_backward
_tanh_backward = torch.ops.aten.tanh_backward

# Elements of one gate in a chunk of slopes: half a MiB in fp32, which stays in a core's cache.
_CHUNK_ELEMENTS = 1 << 17


class _Options(NamedTuple):
    product: torch.dtype
    coupled_gates: bool


def lstm(
    x_BTE: Tensor,
    state: State,
    reset_BT: Tensor | None,
    weights: LstmWeights,
    *,
    coupled_gates: bool,
) -> tuple[Tensor, State]:
    """LSTM with coupled gates, layer norm and temporal residual as switches: shapes, equations in `reference.lstm`."""
    options = _Options(product_dtype(weights.recurrent_GD), coupled_gates)
    with torch.autocast(x_BTE.device.type, enabled=False):
        y_BTD, *last = _Lstm.apply(x_BTE, *state, reset_BT, *weights, options)  # type: ignore[no-untyped-call]
    return y_BTD, tuple(last)


def gru(x_BTE: Tensor, state: State, reset_BT: Tensor | None, weights: GruWeights) -> tuple[Tensor, State]:
    """GRU with layer norm and temporal residual as switches: shapes, equations in `reference.gru`."""
    options = _Options(product_dtype(weights.recurrent_GD), False)
    with torch.autocast(x_BTE.device.type, enabled=False):
        y_BTD, hidden_BD = _Gru.apply(x_BTE, *state, reset_BT, *weights, options)  # type: ignore[no-untyped-call]
    return y_BTD, (hidden_BD,)


def _chunks(num_steps: int, elements_a_step: int) -> Iterator[tuple[int, int]]:
    """[start, stop) of chunks of steps, last chunk first."""
    length = max(1, _CHUNK_ELEMENTS // elements_a_step)
    for stop in range(num_steps, 0, -length):
        yield max(0, stop - length), stop


class _Lstm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_BTE: Tensor,
        hidden_BD: Tensor,
        cell_BD: Tensor,
        reset_BT: Tensor | None,
        input_GE: Tensor,
        recurrent_GD: Tensor,
        bias_G: Tensor,
        norm_scale_D: Tensor | None,
        norm_shift_D: Tensor | None,
        skip_scale_D: Tensor | None,
        options: _Options,
    ) -> tuple[Tensor, Tensor, Tensor]:
        kept = state_dtype(options.product)
        ctx.options, ctx.resets = options, Resets(reset_BT)
        ctx.dtypes = (x_BTE.dtype, hidden_BD.dtype, cell_BD.dtype, input_GE.dtype)
        drive = Drive(x_BTE, input_GE, bias_G, options.product)
        weight = PackedWeight(recurrent_GD, options.product, num_rows=x_BTE.shape[0])
        norm = Norm(norm_scale_D, norm_shift_D).to(kept)
        hidden = HiddenStates(hidden_BD.to(kept), norm, num_steps=x_BTE.shape[1], product=options.product)
        cells_PBD = torch.empty((x_BTE.shape[1] + 1, *cell_BD.shape), dtype=kept, device=x_BTE.device)
        cells_PBD[0].copy_(cell_BD)
        squashed_TBD = torch.empty_like(hidden.updates_TBD)
        skip = Skip(skip_scale_D, kept)
        _lstm_forward(drive, weight, hidden, cells_PBD, squashed_TBD, skip=skip, resets=ctx.resets, options=options)
        saved = (drive.x_TBE, drive.gates_TBG, cells_PBD, squashed_TBD, hidden.outputs_PBD, hidden.updates_TBD)
        ctx.save_for_backward(
            *saved, hidden.statistics(), input_GE, recurrent_GD, norm_scale_D, norm_shift_D, skip_scale_D
        )
        return hidden.outputs_PBD[1:].transpose(0, 1), hidden.last_BD.clone(), cells_PBD[-1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_BTD: Tensor, grad_hidden_BD: Tensor, grad_cell_BD: Tensor) -> tuple[Any, ...]:
        x_TBE, gates_TBG, cells_PBD, squashed_TBD, outputs_PBD, updates_TBD, statistics, *weights = ctx.saved_tensors
        input_GE, recurrent_GD, norm_scale_D, norm_shift_D, skip_scale_D = weights
        x_dtype, hidden_dtype, cell_dtype, dtype = ctx.dtypes
        norm = Norm(norm_scale_D, norm_shift_D).to(updates_TBD.dtype)
        hidden = HiddenGradients(grad_y_BTD, updates_TBD, norm, statistics)
        weight = PackedWeight(recurrent_GD.t(), ctx.options.product, num_rows=x_TBE.shape[1])
        previous_cells_TBD, previous_TBD = ctx.resets.previous(cells_PBD), ctx.resets.previous(outputs_PBD)
        skip = Skip(skip_scale_D, updates_TBD.dtype)
        steps = _lstm_slopes(gates_TBG, previous_cells_TBD, squashed_TBD, coupled_gates=ctx.options.coupled_gates)
        grad_hidden_BD = grad_hidden_BD.to(updates_TBD.dtype, copy=True)
        grad_cell_BD = grad_cell_BD.to(updates_TBD.dtype, copy=True)
        grad_gates_TBG = torch.empty_like(gates_TBG, dtype=ctx.options.product)
        width = updates_TBD.shape[-1]
        grad_blocks_TBXD = grad_gates_TBG.view(*x_TBE.shape[:2], -1, width)
        grad_gates = grad_gates_TBG.unbind(0)
        grad_outputs, grad_others = grad_blocks_TBXD[:, :, 0].unbind(0), grad_blocks_TBXD[:, :, 1:].unbind(0)
        for t, slopes in steps:
            grad_update_BD = hidden.at(t, grad_hidden_BD)
            grad_cell_BD.addcmul_(grad_update_BD, slopes.cell_BD)
            torch.mul(grad_update_BD, slopes.output_BD, out=grad_outputs[t])
            torch.mul(grad_cell_BD.unsqueeze(1), slopes.others_BXD, out=grad_others[t])
            grad_cell_BD.mul_(slopes.forget_BD)
            product_BD = weight.times(grad_gates[t])
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
            weight_gradient(grad_gates_TBG, previous_TBD, dtype),
            bias_gradient(grad_gates_TBG, dtype),
            *hidden.norm_gradients(),
            skip.gradient(),
            None,
        )


def _lstm_forward(
    drive: Drive,
    weight: PackedWeight,
    hidden: HiddenStates,
    cells_PBD: Tensor,
    squashed_TBD: Tensor,
    *,
    skip: Skip,
    resets: Resets,
    options: _Options,
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
        gates[t].add_(weight.times(read_BD))
        sigmoids[t].sigmoid_()
        squash(candidates[t], out=candidates[t])
        if options.coupled_gates:
            cell_BD = torch.lerp(candidates[t], cell_BD, forgets[t], out=cells[t + 1])
        else:
            cell_BD = torch.mul(forgets[t], cell_BD, out=cells[t + 1]).addcmul_(inputs[t], candidates[t])
        squash(cell_BD, out=squashed[t])
        torch.mul(outputs[t], squashed[t], out=updates[t])
        skip.add(hidden_BD, to=updates[t])
        hidden_BD, read_BD = hidden.finish(t)


class _LstmSlopes(NamedTuple):
    """Local derivatives at one step: of the update by the cell and by the output gate, of the cell by what makes it."""

    cell_BD: Tensor
    output_BD: Tensor
    others_BXD: Tensor
    forget_BD: Tensor


def _lstm_slopes(
    gates_TBG: Tensor, previous_cells_TBD: Tensor, squashed_TBD: Tensor, *, coupled_gates: bool
) -> Iterator[tuple[int, _LstmSlopes]]:
    """(t, slopes) from the last step to the first. Gate slopes are those of the gates before sigmoid and tanh."""
    num_steps, num_rows, width = squashed_TBD.shape
    for start, stop in _chunks(num_steps, num_rows * width):
        blocks = gates_TBG[start:stop].chunk(gates_TBG.shape[-1] // width, dim=-1)
        output_KBD, forget_KBD, input_KBD, candidate_KBD = blocks[0], blocks[1], blocks[-2], blocks[-1]
        previous_KBD, squashed_KBD = previous_cells_TBD[start:stop], squashed_TBD[start:stop]
        slopes_KBXD = gates_TBG.new_empty((stop - start, num_rows, len(blocks) - 1, width))
        if coupled_gates:
            previous_KBD = previous_KBD - candidate_KBD
            input_KBD = 1.0 - forget_KBD
        else:
            slopes_KBXD[:, :, 1] = _sigmoid_backward(candidate_KBD, input_KBD)
        slopes_KBXD[:, :, 0] = _sigmoid_backward(previous_KBD, forget_KBD)
        slopes_KBXD[:, :, -1] = _tanh_backward(input_KBD, candidate_KBD)
        cell_KBD = _tanh_backward(output_KBD, squashed_KBD)
        output_slope_KBD = _sigmoid_backward(squashed_KBD, output_KBD)
        rows = zip(cell_KBD, output_slope_KBD, slopes_KBXD, forget_KBD, strict=True)
        for offset, parts in reversed(list(enumerate(rows))):
            yield start + offset, _LstmSlopes(*parts)


class _Gru(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_BTE: Tensor,
        hidden_BD: Tensor,
        reset_BT: Tensor | None,
        input_GE: Tensor,
        recurrent_GD: Tensor,
        bias_G: Tensor,
        candidate_bias_D: Tensor,
        norm_scale_D: Tensor | None,
        norm_shift_D: Tensor | None,
        skip_scale_D: Tensor | None,
        options: _Options,
    ) -> tuple[Tensor, Tensor]:
        kept = state_dtype(options.product)
        ctx.options, ctx.resets = options, Resets(reset_BT)
        ctx.dtypes = (x_BTE.dtype, hidden_BD.dtype, input_GE.dtype)
        drive = Drive(x_BTE, input_GE, bias_G, options.product)
        weight = PackedWeight(recurrent_GD, options.product, num_rows=x_BTE.shape[0])
        norm = Norm(norm_scale_D, norm_shift_D).to(kept)
        hidden = HiddenStates(hidden_BD.to(kept), norm, num_steps=x_BTE.shape[1], product=options.product)
        skip = Skip(skip_scale_D, kept)
        recalled_TBD = _gru_forward(drive, weight, hidden, candidate_bias_D.to(kept), skip=skip, resets=ctx.resets)
        saved = (drive.x_TBE, drive.gates_TBG, recalled_TBD, hidden.outputs_PBD, hidden.updates_TBD)
        ctx.save_for_backward(
            *saved, hidden.statistics(), input_GE, recurrent_GD, norm_scale_D, norm_shift_D, skip_scale_D
        )
        return hidden.outputs_PBD[1:].transpose(0, 1), hidden.last_BD.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_BTD: Tensor, grad_hidden_BD: Tensor) -> tuple[Any, ...]:
        x_TBE, gates_TBG, recalled_TBD, outputs_PBD, updates_TBD, statistics, *weights = ctx.saved_tensors
        input_GE, recurrent_GD, norm_scale_D, norm_shift_D, skip_scale_D = weights
        x_dtype, hidden_dtype, dtype = ctx.dtypes
        width = updates_TBD.shape[-1]
        norm = Norm(norm_scale_D, norm_shift_D).to(updates_TBD.dtype)
        hidden = HiddenGradients(grad_y_BTD, updates_TBD, norm, statistics)
        weight = PackedWeight(recurrent_GD.t(), ctx.options.product, num_rows=x_TBE.shape[1])
        previous_TBD = ctx.resets.previous(outputs_PBD)
        # Four blocks a row, n r z c: the input's product sees n r z, the recurrent one r z c, both without a copy.
        grad_blocks_TBXD = torch.empty((*x_TBE.shape[:2], 4, width), dtype=ctx.options.product, device=x_TBE.device)
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
            torch.mul(grad_update_BD, kept_BD, out=grad_hidden_BD).add_(weight.times(grad_recurrents[t]))
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
            weight_gradient(grad_recurrent_TBG, previous_TBD, dtype),
            bias_gradient(grad_gates_TBG, dtype).roll(-width, 0),
            bias_gradient(grad_recurrent_TBG[..., -width:], dtype),
            *hidden.norm_gradients(),
            skip.gradient(),
            None,
        )


def _gru_forward(
    drive: Drive,
    weight: PackedWeight,
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
        sigmoid_share_BS, candidate_share_BD = weight.times(read_BD).split_with_sizes((2 * width, width), dim=-1)
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
    for start, stop in _chunks(num_steps, num_rows * width):
        resetting_KBD, keeping_KBD, candidate_KBD = gates_TBG[start:stop].chunk(3, dim=-1)
        slopes_KBXD = gates_TBG.new_empty((stop - start, num_rows, 4, width))
        candidate_slope_KBD = _tanh_backward(1.0 - keeping_KBD, candidate_KBD)
        slopes_KBXD[:, :, 0] = candidate_slope_KBD
        slopes_KBXD[:, :, 1] = _sigmoid_backward(candidate_slope_KBD * recalled_TBD[start:stop], resetting_KBD)
        slopes_KBXD[:, :, 2] = _sigmoid_backward(previous_TBD[start:stop] - candidate_KBD, keeping_KBD)
        torch.mul(candidate_slope_KBD, resetting_KBD, out=slopes_KBXD[:, :, 3])
        for offset in reversed(range(stop - start)):
            yield start + offset, slopes_KBXD[offset], keeping_KBD[offset]
