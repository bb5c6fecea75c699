"""Recurrent cells on a GPU: a hand-derived backward, one fused Triton kernel and one matrix product a position.

The names, signatures and results are those of `reference.py`, with all switches and recurrences. How a window runs is
in `gpu_window.py`, its launches as CUDA graphs in `gpu_graphs.py`, the kernels in `tritonsrc/`, the cells on a linear
scan in `gpu_scan.py`. A window is one custom operator, so that autograd, autocast, DDP and torch.compile take it for an
operator of PyTorch's own.

Legend: B rows, T time, D width, E input width, K units that a unit hears from, X gates, G = X * D all gates.
"""

from typing import Any

import torch
from torch import Tensor

from reprise.kernels import gpu_window
from reprise.kernels.gpu_launch import obstacle, on_device_of
from reprise.kernels.gpu_layout import CellInputs, Saved
from reprise.kernels.gpu_scan import linear_scan, mingru, minlstm, rglru
from reprise.kernels.products import product_dtype, state_dtype
from reprise.kernels.reference import GruWeights, LstmWeights, State
from reprise.runtime import UserError

__all__ = ["gru", "linear_scan", "lstm", "mingru", "minlstm", "obstacle", "rglru"]

# A norm needs its row in the registers of one program.
_WIDEST_NORM = 8192


def lstm(
    x_BTE: Tensor,
    state: State,
    reset_BT: Tensor | None,
    weights: LstmWeights,
    *,
    coupled_gates: bool,
) -> tuple[Tensor, State]:
    """LSTM with all switches and recurrences: shapes, equations, errors in `reference.lstm`."""
    inputs = CellInputs(
        x_BTE=x_BTE,
        reset_BT=reset_BT,
        candidate_bias_D=None,
        kind="coupled_lstm" if coupled_gates else "lstm",
        product=product_dtype(weights.recurrent_GK),
        **weights._asdict(),
    )
    return _run(inputs, state)


def gru(x_BTE: Tensor, state: State, reset_BT: Tensor | None, weights: GruWeights) -> tuple[Tensor, State]:
    """GRU with all switches and recurrences: shapes, equations, errors in `reference.gru`."""
    inputs = CellInputs(
        x_BTE=x_BTE,
        reset_BT=reset_BT,
        kind="gru",
        product=product_dtype(weights.recurrent_GK),
        **weights._asdict(),
    )
    return _run(inputs, state)


def _run(inputs: CellInputs, state: State) -> tuple[Tensor, State]:
    """Outputs, and as many parts of the state as came in."""
    width = state[0].shape[1]
    if inputs.norm_scale_D is not None and width > _WIDEST_NORM:
        raise UserError(
            f"model.width={width} with model.cell.layer_norm=true: implementation=triton takes up to {_WIDEST_NORM} "
            "units; the way out: model.cell.implementation=eager"
        )
    differentiable = (part for part in (*state, *inputs) if isinstance(part, Tensor))
    keep = torch.is_grad_enabled() and any(part.requires_grad for part in differentiable)
    kept_state = [part.to(state_dtype(inputs.product)) for part in state]
    cell_BD = kept_state[1] if len(state) == 2 else None
    y_BTD, *last = _cell(kept_state[0], cell_BD, *inputs, keep)
    return y_BTD, tuple(last[: len(state)])


# What both operators are given, in the order of CellInputs, what backward gives back, and what it reads. The state that
# a window starts with is not among it: whoever carries it from window to window may overwrite it before backward.
_INPUTS = (
    "Tensor x_BTE, Tensor? reset_BT, Tensor input_GE, Tensor recurrent_GK, Tensor bias_G, Tensor? candidate_bias_D, "
    "Tensor? norm_scale_D, Tensor? norm_shift_D, Tensor? skip_scale_D, str kind, ScalarType product"
)
_STATE = ("hidden_BD", "cell_BD")
_NOT_DIFFERENTIABLE = ("reset_BT", "kind", "product")
_DIFFERENTIABLE = tuple(name for name in CellInputs._fields if name not in _NOT_DIFFERENTIABLE)
_SAVED = "Tensor gates_TBG, Tensor reads_TBD, Tensor memories_TBD, Tensor statistics_TB2"


@torch.library.custom_op(
    "reprise::triton_cell",
    mutates_args=(),
    schema=f"(Tensor hidden_BD, Tensor? cell_BD, {_INPUTS}, bool keep) -> "
    f"(Tensor y_BTD, Tensor last_hidden_BD, Tensor last_cell_BD, {_SAVED})",
)
def _cell(hidden_BD: Tensor, cell_BD: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    inputs, keep = CellInputs(*arguments[:-1]), arguments[-1]
    with on_device_of(inputs.x_BTE):
        y_BTD, last_hidden_BD, last_cell_BD, saved = gpu_window.forward(inputs, hidden_BD, cell_BD, keep=keep)
    return y_BTD, last_hidden_BD, last_cell_BD, *saved


@_cell.register_fake
def _(hidden_BD: Tensor, cell_BD: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    inputs, keep = CellInputs(*arguments[:-1]), arguments[-1]
    num_rows, num_steps, _ = inputs.x_BTE.shape
    y_TBD = inputs.x_BTE.new_empty((num_steps, num_rows, hidden_BD.shape[1]), dtype=inputs.product)
    last = (hidden_BD.new_empty(0 if part is None else part.shape) for part in (hidden_BD, cell_BD))
    return y_TBD.transpose(0, 1), *last, *gpu_window.allocate(inputs, keep=keep)


@torch.library.custom_op(
    "reprise::triton_cell_backward",
    mutates_args=(),
    schema=f"({_INPUTS}, {_SAVED}, Tensor grad_y_BTD, Tensor grad_hidden_BD, Tensor? grad_cell_BD) -> "
    f"({', '.join(f'Tensor grad_of_{name}' for name in _STATE + _DIFFERENTIABLE)})",
)
def _cell_backward(*arguments: Any) -> tuple[Tensor, ...]:
    inputs = CellInputs(*arguments[: len(CellInputs._fields)])
    *saved, grad_y_BTD, grad_hidden_BD, grad_cell_BD = arguments[len(CellInputs._fields) :]
    with on_device_of(inputs.x_BTE):
        gradients = gpu_window.backward(
            inputs,
            Saved(*saved),
            grad_outputs_BTD=grad_y_BTD,
            grad_hidden_BD=grad_hidden_BD,
            grad_cell_BD=grad_cell_BD,
        )
    names = _STATE + _DIFFERENTIABLE
    return tuple(gradients[name] if name in gradients else inputs.x_BTE.new_empty(0) for name in names)


@_cell_backward.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    inputs = CellInputs(*arguments[: len(CellInputs._fields)])
    num_rows, num_steps, width_in = inputs.x_BTE.shape
    grad_x_BTE = inputs.x_BTE.new_empty((num_steps, num_rows, width_in)).transpose(0, 1)
    weights = [getattr(inputs, name) for name in _DIFFERENTIABLE[1:]]

    def like(part: Tensor | None) -> Tensor:
        return inputs.x_BTE.new_empty(0) if part is None else part.new_empty(part.shape)

    return *map(like, arguments[-2:]), grad_x_BTE, *map(like, weights)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    # No gradient comes for what is kept for backward; zeros in its place would be as large as all of it.
    ctx.set_materialize_grads(False)
    _, _, *tensors, ctx.kind, ctx.product, _ = inputs
    ctx.save_for_backward(*tensors, *output[3:])


def _differentiate(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    num_inputs = len(CellInputs._fields) - 2
    inputs = CellInputs._make((*ctx.saved_tensors[:num_inputs], ctx.kind, ctx.product))
    saved = Saved(*ctx.saved_tensors[num_inputs:])
    grad_y_BTD, *grad_last = gradients[:3]
    if grad_y_BTD is None:
        grad_y_BTD = torch.zeros_like(saved.reads_TBD).transpose(0, 1)
    nothing_BD = saved.reads_TBD.new_zeros(saved.reads_TBD.shape[1:], dtype=saved.gates_TBG.dtype)
    grad_hidden_BD, grad_cell_BD = (nothing_BD if part is None else part for part in grad_last)
    has_cell = inputs.kind != "gru"
    results = _cell_backward(*inputs, *saved, grad_y_BTD, grad_hidden_BD, grad_cell_BD if has_cell else None)
    by_name = dict(zip(_STATE + _DIFFERENTIABLE, results, strict=True))
    absent = [name for name, part in inputs._asdict().items() if part is None] + ([] if has_cell else ["cell_BD"])
    # Nothing for `keep`.
    return *(None if name in absent else by_name.get(name) for name in _STATE + CellInputs._fields), None


_cell.register_autograd(_differentiate, setup_context=_keep_for_backward)
