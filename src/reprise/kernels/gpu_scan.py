"""Linear scan on a GPU as one Triton launch each way, and the cells on it.

The names, signatures and results are those of `reference_scan.py`. A cell's gates are PyTorch's own operations over the
whole window; the scan is a custom operator, so that autograd and torch.compile take it for one of PyTorch's own.

Legend: B rows, T time, D width, E input width.
"""

from typing import Any

import torch
from torch import Tensor

from reprise.kernels.gpu_launch import BLOCK_UNITS, num_stages, num_warps, on_device_of, power_of_two, triton_dtype
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


def linear_scan(decay_BTD: Tensor, value_BTD: Tensor, initial_BD: Tensor, reset_BT: Tensor | None) -> Tensor:
    """h_t = a_t * h_{t-1} + v_t: shapes, formats and resets as in `reference_scan.linear_scan`."""
    states_BTD: Tensor = _scan(decay_BTD, value_BTD, initial_BD, reset_BT)
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


@torch.library.custom_op("reprise::triton_linear_scan", mutates_args=())
def _scan(decay_BTD: Tensor, value_BTD: Tensor, initial_BD: Tensor, reset_BT: Tensor | None) -> Tensor:
    from reprise.kernels.tritonsrc.scan import scan_forward

    states_BTD = value_BTD.new_empty(value_BTD.shape, dtype=scan_dtype(decay_BTD, value_BTD, initial_BD))
    read = {"decay_BTD": decay_BTD, "value_BTD": value_BTD, "initial_BD": initial_BD, "reset_BT": reset_BT}
    _launch(scan_forward, read, {"states_BTD": states_BTD}, states_BTD.dtype)
    return states_BTD


@_scan.register_fake
def _(decay_BTD: Tensor, value_BTD: Tensor, initial_BD: Tensor, reset_BT: Tensor | None) -> Tensor:
    return value_BTD.new_empty(value_BTD.shape, dtype=scan_dtype(decay_BTD, value_BTD, initial_BD))


@torch.library.custom_op("reprise::triton_linear_scan_backward", mutates_args=())
def _scan_backward(
    decay_BTD: Tensor,
    initial_BD: Tensor,
    reset_BT: Tensor | None,
    states_BTD: Tensor,
    grad_states_BTD: Tensor,
    value_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    from reprise.kernels.tritonsrc.scan import scan_backward

    gradients = (
        decay_BTD.new_empty(decay_BTD.shape),
        decay_BTD.new_empty(decay_BTD.shape, dtype=value_dtype),
        initial_BD.new_empty(initial_BD.shape),
    )
    names = ("grad_decay_BTD", "grad_value_BTD", "grad_initial_BD")
    read = {"decay_BTD": decay_BTD, "initial_BD": initial_BD, "reset_BT": reset_BT}
    read |= {"states_BTD": states_BTD, "grad_states_BTD": grad_states_BTD}
    _launch(scan_backward, read, dict(zip(names, gradients, strict=True)), states_BTD.dtype)
    return gradients


@_scan_backward.register_fake
def _(
    decay_BTD: Tensor,
    initial_BD: Tensor,
    reset_BT: Tensor | None,
    states_BTD: Tensor,
    grad_states_BTD: Tensor,
    value_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_decay_BTD = decay_BTD.new_empty(decay_BTD.shape)
    return grad_decay_BTD, torch.empty_like(grad_decay_BTD, dtype=value_dtype), initial_BD.new_empty(initial_BD.shape)


def _launch(kernel: Any, read: dict[str, Tensor | None], written: dict[str, Tensor], kept: torch.dtype) -> None:
    """One program for each row and block of units. What is read is made contiguous first."""
    decay_BTD, reset_BT = read["decay_BTD"], read["reset_BT"]
    assert decay_BTD is not None
    num_rows, num_steps, width = decay_BTD.shape
    block = min(power_of_two(width), BLOCK_UNITS)
    arguments = {name: None if part is None else part.contiguous() for name, part in read.items()}
    arguments["reset_BT"] = None if reset_BT is None else reset_BT.contiguous().view(torch.uint8)
    with on_device_of(decay_BTD):
        kernel[num_rows, -(-width // block)](
            **arguments,
            **written,
            num_steps=num_steps,
            WIDTH=width,
            BLOCK=block,
            KEPT=triton_dtype(kept),
            STAGES=num_stages(block, kept),
            num_warps=num_warps(block),
        )


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    decay_BTD, value_BTD, initial_BD, reset_BT = inputs
    ctx.value_dtype = value_BTD.dtype
    # A copy: whoever carries the state from window to window may overwrite it before backward.
    ctx.save_for_backward(decay_BTD, initial_BD.clone(), reset_BT, output)


def _differentiate(ctx: Any, grad_states_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    gradients = _scan_backward(*ctx.saved_tensors, grad_states_BTD, ctx.value_dtype)
    return *gradients, None


_scan.register_autograd(_differentiate, setup_context=_keep)
