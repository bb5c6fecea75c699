"""Linear scan with a hand-derived backward in plain PyTorch operations, and the cells on it: every device.

The names, signatures and results are those of `reference_scan.py`. A step of the scan is one fused operation on [B, D]
that writes into a buffer, forward and backward. Measured on a CPU at 32 rows, 128 steps, 512 units against this loop:
chunks whose steps run side by side (two passes, prefix products kept) took 7 times as long, doubling (Hillis and Steele
1986) 8 times, since both move the whole window through memory again and again. They win where there is little else to
do at once (one row of 4,096 steps: chunks took a third of the time), which a native scan does better still.

Legend: B rows, T time, D width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from reprise.kernels.reference import State
from reprise.kernels.reference_scan import (
    MinimalWeights,
    RgLruWeights,
    mingru_terms,
    minlstm_terms,
    rglru_terms,
    scan_cell,
    scan_dtype,
)
from reprise.kernels.window import Resets


def linear_scan(decay_BTD: Tensor, value_BTD: Tensor, initial_BD: Tensor, reset_BT: Tensor | None) -> Tensor:
    """h_t = a_t * h_{t-1} + v_t: shapes, formats and resets as in `reference_scan.linear_scan`."""
    states_BTD: Tensor = _LinearScan.apply(decay_BTD, value_BTD, initial_BD, reset_BT)  # type: ignore[no-untyped-call]
    return states_BTD


def mingru(x_BTE: Tensor, state: State, reset_BT: Tensor | None, weights: MinimalWeights) -> tuple[Tensor, State]:
    """minGRU: shapes and equations in `reference_scan.mingru`."""
    return scan_cell(x_BTE, state, reset_BT, weights, terms=mingru_terms, scan=linear_scan)


def minlstm(x_BTE: Tensor, state: State, reset_BT: Tensor | None, weights: MinimalWeights) -> tuple[Tensor, State]:
    """minLSTM: shapes and equations in `reference_scan.minlstm`."""
    return scan_cell(x_BTE, state, reset_BT, weights, terms=minlstm_terms, scan=linear_scan)


def rglru(x_BTE: Tensor, state: State, reset_BT: Tensor | None, weights: RgLruWeights) -> tuple[Tensor, State]:
    """RG-LRU: shapes and equations in `reference_scan.rglru`."""
    return scan_cell(x_BTE, state, reset_BT, weights, terms=rglru_terms, scan=linear_scan)


class _LinearScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, decay_BTD: Tensor, value_BTD: Tensor, initial_BD: Tensor, reset_BT: Tensor | None) -> Tensor:
        """decay, value [B, T, D] in any format, initial [B, D], reset [B, T] bool or None.

        Returns every state [B, T, D] in fp32, or fp64 where an input is fp64. Equation: `reference_scan.linear_scan`.
        """
        kept = scan_dtype(decay_BTD, value_BTD, initial_BD)
        ctx.resets, ctx.dtypes = Resets(reset_BT), (decay_BTD.dtype, value_BTD.dtype, initial_BD.dtype)
        states_BTD = torch.empty_like(value_BTD, dtype=kept, memory_format=torch.contiguous_format)
        # A copy, since who carries a state may write the next one over it before backward.
        initial_BD = initial_BD.to(kept, copy=True)
        states, state_BD = states_BTD.unbind(1), initial_BD
        parts = zip(decay_BTD.to(kept).unbind(1), value_BTD.to(kept).unbind(1), states, strict=True)
        for t, (decay_BD, value_BD, out_BD) in enumerate(parts):
            if t in ctx.resets.steps:
                state_BD = ctx.resets.cleared(state_BD, t)
            state_BD = torch.addcmul(value_BD, decay_BD, state_BD, out=out_BD)
        ctx.save_for_backward(decay_BTD, initial_BD, states_BTD, reset_BT)
        return states_BTD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_states_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """The gradient of a state is its own and the next state's times the next decay: the same scan, run backwards.

        It is the value's gradient too; times the state before, it is the decay's.
        """
        decay_BTD, initial_BD, states_BTD, reset_BT = ctx.saved_tensors
        decay_dtype, value_dtype, initial_dtype = ctx.dtypes
        grad_values_BTD = torch.empty_like(states_BTD)
        grad_values, grad_states = grad_values_BTD.unbind(1), grad_states_BTD.unbind(1)
        decays = decay_BTD.to(states_BTD.dtype).unbind(1)
        grad_BD = grad_values[-1].copy_(grad_states[-1])
        for t in reversed(range(1, len(decays))):
            if t in ctx.resets.steps:
                grad_BD = torch.add(
                    grad_states[t - 1], ctx.resets.cleared(grad_BD * decays[t], t), out=grad_values[t - 1]
                )
            else:
                grad_BD = torch.addcmul(grad_states[t - 1], grad_BD, decays[t], out=grad_values[t - 1])
        grad_initial_BD = grad_BD * decays[0]
        if 0 in ctx.resets.steps:
            grad_initial_BD = ctx.resets.cleared(grad_initial_BD, 0)
        grad_decay_BTD = torch.empty_like(states_BTD)
        torch.mul(grad_values_BTD[:, 0], initial_BD, out=grad_decay_BTD[:, 0])
        torch.mul(grad_values_BTD[:, 1:], states_BTD[:, :-1], out=grad_decay_BTD[:, 1:])
        if reset_BT is not None:
            grad_decay_BTD.masked_fill_(reset_BT.unsqueeze(-1), 0.0)
        return grad_decay_BTD.to(decay_dtype), grad_values_BTD.to(value_dtype), grad_initial_BD.to(initial_dtype), None
