"""LSTM and GRU on a CPU through the C++ kernels in `csrc/`: the names and signatures of `reference.py`, fp32 and bf16.

The input's product over all time steps is PyTorch's; `reprise::recurrence` is the window that follows it, one call.
Both directions are custom operators, so that autograd, autocast, DDP and torch.compile take them as PyTorch's own.

Legend: B rows, T time, D width, E input width, K inputs of a unit's recurrent product, G all gates side by side.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear as dense

from reprise.kernels import native
from reprise.kernels.cpu_window import CELLS, SLICE, call, check_shapes, plain
from reprise.kernels.products import product_dtype, recurrence_structure
from reprise.kernels.reference import GruWeights, LstmWeights, State
from reprise.kernels.window_memory import MEMORY


def lstm(
    x_BTE: Tensor, state: State, reset_BT: Tensor | None, weights: LstmWeights, *, coupled_gates: bool
) -> tuple[Tensor, State]:
    """As `reference.lstm`. Raises UserError also where the products are neither fp32 nor bf16."""
    product = product_dtype(weights.recurrent_GK)
    native.check_format(product)
    recurrence_structure(weights.recurrent_GK, state[0].shape[1])
    if x_BTE.shape[1] == 0:
        return _no_steps(x_BTE, state, product)
    with torch.autocast("cpu", enabled=False):
        y_BTD, hidden_BD, cell_BD, *_ = torch.ops.reprise.recurrence(
            dense(x_BTE.to(product), weights.input_GE.to(product)),
            state[0].float(),
            state[1].float(),
            reset_BT,
            weights.recurrent_GK,
            weights.bias_G,
            None,
            weights.norm_scale_D,
            weights.norm_shift_D,
            weights.skip_scale_D,
            "coupled" if coupled_gates else "textbook",
        )
    return y_BTD, (hidden_BD, cell_BD)


def gru(x_BTE: Tensor, state: State, reset_BT: Tensor | None, weights: GruWeights) -> tuple[Tensor, State]:
    """As `reference.gru`. Raises UserError also where the products are neither fp32 nor bf16."""
    product = product_dtype(weights.recurrent_GK)
    native.check_format(product)
    recurrence_structure(weights.recurrent_GK, state[0].shape[1])
    if x_BTE.shape[1] == 0:
        return _no_steps(x_BTE, state, product)
    with torch.autocast("cpu", enabled=False):
        # The kernel's order of the input's gates is n, r, z: with r, z, c of the recurrent product one tensor of
        # gradients, n r z c, holds what both products need.
        width = state[0].shape[1]
        y_BTD, hidden_BD, *_ = torch.ops.reprise.recurrence(
            dense(x_BTE.to(product), weights.input_GE.to(product).roll(width, 0)),
            state[0].float(),
            None,
            reset_BT,
            weights.recurrent_GK,
            weights.bias_G.roll(width),
            weights.candidate_bias_D,
            weights.norm_scale_D,
            weights.norm_shift_D,
            weights.skip_scale_D,
            "gru",
        )
    return y_BTD, (hidden_BD,)


def _no_steps(x_BTE: Tensor, state: State, product: torch.dtype) -> tuple[Tensor, State]:
    """A window without positions: no outputs, and the state as it was."""
    return x_BTE.new_empty((*x_BTE.shape[:2], state[0].shape[1]), dtype=product), tuple(part.float() for part in state)


def _weights(
    recurrent_GK: Tensor,
    bias_G: Tensor,
    candidate_bias_D: Tensor | None,
    norm_scale_D: Tensor | None,
    norm_shift_D: Tensor | None,
    skip_scale_D: Tensor | None,
) -> dict[str, Tensor | None]:
    return {
        "weight": plain(recurrent_GK),
        "bias": plain(bias_G),
        "candidate_bias": plain(candidate_bias_D),
        "norm_scale": plain(norm_scale_D),
        "norm_shift": plain(norm_shift_D),
        "skip_scale": plain(skip_scale_D),
    }


def _room(
    drive_BTG: Tensor,
    hidden_BD: Tensor,
    cell_BD: Tensor | None,
    *,
    kind: str,
    has_norm: bool,
    empty: Callable[[Sequence[int], torch.dtype], Tensor],
) -> dict[str, Tensor]:
    """Room for what a window makes, in the operator's order: outputs, last state; then what backward reads.

    `empty` makes what only backward reads: a tensor of a shape and a format.
    """
    num_rows, num_steps, width = *drive_BTG.shape[:2], hidden_BD.shape[1]
    output_BTD = drive_BTG.new_empty((num_rows, num_steps, width))
    num_units = -(-width // SLICE) * SLICE
    return {
        "output": output_BTD,
        # Of the shape only: a state may come with other strides.
        "last_hidden": hidden_BD.new_empty(hidden_BD.shape),
        "last_cell": hidden_BD.new_empty((0,) if cell_BD is None else cell_BD.shape),
        "previous": empty(output_BTD.shape, output_BTD.dtype),
        "kept": empty((num_steps, num_rows, num_units, CELLS[kind].num_kept + has_norm), drive_BTG.dtype),
        "inverse_deviation": hidden_BD.new_empty((num_steps, num_rows) if has_norm else (0,)),
    }


@torch.library.custom_op("reprise::recurrence", mutates_args=(), device_types="cpu")
def _recurrence(
    drive_BTG: Tensor,
    hidden_BD: Tensor,
    cell_BD: Tensor | None,
    reset_BT: Tensor | None,
    recurrent_GK: Tensor,
    bias_G: Tensor,
    candidate_bias_D: Tensor | None,
    norm_scale_D: Tensor | None,
    norm_shift_D: Tensor | None,
    skip_scale_D: Tensor | None,
    kind: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Outputs [B, T, D], last hidden and cell state; then, for backward, the hidden states read, gates, deviations."""
    vectors = (candidate_bias_D, norm_scale_D, norm_shift_D, skip_scale_D)
    check_shapes(drive_BTG, hidden_BD, cell_BD, reset_BT, recurrent_GK, bias_G, vectors)
    room = _room(drive_BTG, hidden_BD, cell_BD, kind=kind, has_norm=norm_scale_D is not None, empty=MEMORY.empty)
    state = {"drive": plain(drive_BTG, drive_BTG.dtype), "hidden": plain(hidden_BD), "cell": plain(cell_BD)}
    weights = _weights(recurrent_GK, bias_G, candidate_bias_D, norm_scale_D, norm_shift_D, skip_scale_D)
    reset_BT = plain(reset_BT, torch.bool)
    call("recurrence_forward", kind, drive_BTG.dtype, {**state, **weights, **room}, reset_BT=reset_BT)
    return tuple(room.values())  # type: ignore[return-value]


@_recurrence.register_fake
def _(
    drive_BTG: Tensor, hidden_BD: Tensor, cell_BD: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return drive_BTG.new_empty(shape, dtype=dtype)

    room = _room(drive_BTG, hidden_BD, cell_BD, kind=others[-1], has_norm=others[4] is not None, empty=empty)
    return tuple(room.values())  # type: ignore[return-value]


@torch.library.custom_op("reprise::recurrence_backward", mutates_args=(), device_types="cpu")
def _recurrence_backward(
    grad_output_BTD: Tensor,
    grad_last_hidden_BD: Tensor,
    grad_last_cell_BD: Tensor | None,
    cell_BD: Tensor | None,
    reset_BT: Tensor | None,
    recurrent_GK: Tensor,
    bias_G: Tensor,
    candidate_bias_D: Tensor | None,
    norm_scale_D: Tensor | None,
    norm_shift_D: Tensor | None,
    skip_scale_D: Tensor | None,
    previous_BTD: Tensor,
    kept: Tensor,
    inverse_deviation_TB: Tensor,
    kind: str,
) -> list[Tensor]:
    """Gradients of the gates' sums [B, T, blocks * D], the state, the recurrent weight, the biases, norm and skip."""
    weights = _weights(recurrent_GK, bias_G, candidate_bias_D, norm_scale_D, norm_shift_D, skip_scale_D)
    read = {
        "cell": plain(cell_BD),
        "output": previous_BTD,
        "previous": previous_BTD,
        "kept": kept,
        "inverse_deviation": inverse_deviation_TB,
        "grad_output": plain(grad_output_BTD, previous_BTD.dtype),
        "grad_last_hidden": plain(grad_last_hidden_BD),
        "grad_last_cell": plain(grad_last_cell_BD),
    }
    made = _gradient_room(previous_BTD, recurrent_GK, kind=kind)
    is_diagonal = recurrent_GK.shape[1] == 1 < previous_BTD.shape[2]
    reset_BT = plain(reset_BT, torch.bool)
    call("recurrence_backward", kind, previous_BTD.dtype, {**weights, **read, **made}, reset_BT=reset_BT)
    if not is_diagonal:
        made["grad_weight"] = _weight_gradient(made["grad_drive"], previous_BTD, recurrent_GK)
    return list(made.values())


@_recurrence_backward.register_fake
def _(*tensors: Any) -> list[Tensor]:
    return list(_gradient_room(tensors[11], tensors[5], kind=tensors[-1]).values())


def _gradient_room(previous_BTD: Tensor, recurrent_GK: Tensor, *, kind: str) -> dict[str, Tensor]:
    num_rows, num_steps, width = previous_BTD.shape
    num_blocks = CELLS[kind].num_gradients

    def room(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=previous_BTD.device)

    return {
        "grad_drive": room(num_rows, num_steps, num_blocks * width, dtype=previous_BTD.dtype),
        "grad_hidden": room(num_rows, width),
        "grad_cell": room(num_rows, width),
        "grad_weight": room(*recurrent_GK.shape),
        "grad_bias": room(num_blocks * width),
        "grad_norm_scale": room(width),
        "grad_norm_shift": room(width),
        "grad_skip_scale": room(width),
    }


def _weight_gradient(grad_BTX: Tensor, previous_BTD: Tensor, recurrent_GK: Tensor) -> Tensor:
    """Gradient of the recurrent weight [G, K]: one product over all steps, head by head where there are heads."""
    num_gates_width, num_inputs = recurrent_GK.shape
    width = previous_BTD.shape[-1]
    grad_NG = grad_BTX.flatten(0, 1)[:, -num_gates_width:]
    previous_ND = previous_BTD.flatten(0, 1)
    if num_inputs == width:
        return torch.mm(grad_NG.t(), previous_ND).float()
    num_heads, num_gates = width // num_inputs, num_gates_width // width
    grad_NGHK = grad_NG.reshape(-1, num_gates, num_heads, num_inputs)
    grad_HXN = grad_NGHK.permute(2, 1, 3, 0).flatten(1, 2)
    previous_HNK = previous_ND.view(-1, num_heads, num_inputs).transpose(0, 1)
    weight_HXK = torch.bmm(grad_HXN, previous_HNK).float()
    return weight_HXK.view(num_heads, num_gates, num_inputs, num_inputs).transpose(0, 1).flatten(0, 2)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, cell_BD, *rest, kind = inputs
    ctx.kind = kind
    # A copy: whoever carries the state from window to window may overwrite it before backward.
    ctx.save_for_backward(None if cell_BD is None else cell_BD.detach().clone(), *rest, *output[3:])
    # Zeros for the gradient of what only backward reads, `kept` above all, would cost as much as the gates do.
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, *gradients: Tensor | None) -> Any:
    cell_BD, reset_BT, recurrent_GK, bias_G, candidate_bias_D, scale_D, shift_D, skip_D, *kept = ctx.saved_tensors
    previous_BTD = kept[0]
    num_rows, _, width = previous_BTD.shape
    parts = (previous_BTD.shape, (num_rows, width), (num_rows, width if cell_BD is not None else 0))
    grad_output_BTD, grad_hidden_BD, grad_cell_BD = (
        recurrent_GK.new_zeros(shape) if gradient is None else gradient
        for shape, gradient in zip(parts, gradients[:3], strict=True)
    )
    drive, hidden, cell, weight, bias, norm_scale, norm_shift, skip = torch.ops.reprise.recurrence_backward(
        grad_output_BTD,
        grad_hidden_BD,
        None if cell_BD is None else grad_cell_BD,
        cell_BD,
        reset_BT,
        recurrent_GK,
        bias_G,
        candidate_bias_D,
        scale_D,
        shift_D,
        skip_D,
        *kept,
        ctx.kind,
    )
    candidate = None
    if ctx.kind == "gru":
        # Blocks n, r, z, c: the input's product has the first three, and c belongs to the bias inside the reset gate.
        drive, bias, candidate = drive[..., : 3 * width], bias[: 3 * width], bias[3 * width :]
    return (
        drive,
        hidden,
        None if cell_BD is None else cell,
        None,
        weight.to(recurrent_GK.dtype),
        bias.to(bias_G.dtype),
        None if candidate_bias_D is None or candidate is None else candidate.to(candidate_bias_D.dtype),
        None if scale_D is None else norm_scale.to(scale_D.dtype),
        None if shift_D is None else norm_shift.to(shift_D.dtype),
        None if skip_D is None else skip.to(skip_D.dtype),
        None,
    )


_recurrence.register_autograd(_gradients, setup_context=_keep_for_backward)
