"""A window of time steps as `csrc/window.h` has it: its fields, what must fit together in it, and the call.

Legend: B rows, T time, D width, K inputs of a unit's recurrent product, G all gates side by side.
"""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from reprise.kernels import native
from reprise.kernels.reference import NORM_EPSILON


@dataclass(frozen=True)
class Cell:
    """A cell as `csrc/cells.h` has it: its number, vectors kept for backward, and blocks of gradients a row."""

    number: int
    num_kept: int
    num_gradients: int


CELLS = {"coupled": Cell(0, 4, 3), "textbook": Cell(1, 5, 4), "gru": Cell(2, 4, 4)}
# Units are padded to whole slices: two vectors of `csrc/vectors.h`.
SLICE = 32

_WEIGHTS = ("drive", "weight", "bias", "candidate_bias", "norm_scale", "norm_shift", "skip_scale")
_FORWARD = ("reset", "hidden", "cell", "output", "previous", "last_hidden", "last_cell", "kept", "inverse_deviation")
_BACKWARD = ("grad_output", "grad_last_hidden", "grad_last_cell", "grad_drive", "grad_hidden", "grad_cell", "grad_bias")
_PARAMETERS = ("grad_norm_scale", "grad_norm_shift", "grad_skip_scale", "grad_weight")


class _Window(ctypes.Structure):
    """`Window` of `csrc/window.h`, field by field."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_rows", "num_steps", "width", "num_inputs", "num_threads")),
        *((name, ctypes.c_void_p) for name in _WEIGHTS),
        ("norm_epsilon", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in _FORWARD + _BACKWARD + _PARAMETERS),
    )


def check_shapes(
    drive_BTG: Tensor,
    hidden_BD: Tensor,
    cell_BD: Tensor | None,
    reset_BT: Tensor | None,
    recurrent_GK: Tensor,
    bias_G: Tensor,
    vectors: tuple[Tensor | None, ...],
) -> None:
    """Native code trusts what it is given: whatever does not fit ends here."""
    num_rows, num_steps, num_gates_width = drive_BTG.shape
    width = hidden_BD.shape[1]
    assert num_steps > 0 and num_gates_width % width == 0
    assert hidden_BD.shape == (num_rows, width)
    assert cell_BD is None or cell_BD.shape == (num_rows, width)
    assert reset_BT is None or (reset_BT.shape == (num_rows, num_steps) and reset_BT.dtype == torch.bool)
    assert recurrent_GK.shape[0] == num_gates_width and bias_G.shape == (num_gates_width,)
    assert all(vector is None or vector.shape == (width,) for vector in vectors)


def call(
    function: str, kind: str, product: torch.dtype, parts: dict[str, Tensor | None], *, reset_BT: Tensor | None
) -> None:
    """One pass over a window. Every part is fp32 and contiguous, or in the products' format as `Window` says."""
    output, weight = parts["output"], parts["weight"]
    assert output is not None and weight is not None
    tensors = parts | {"reset": reset_BT}
    window = _Window(
        num_rows=output.shape[0],
        num_steps=output.shape[1],
        width=output.shape[2],
        num_inputs=weight.shape[1],
        num_threads=torch.get_num_threads(),
        norm_epsilon=NORM_EPSILON,
        **{name: None if part is None else part.data_ptr() for name, part in tensors.items()},
    )
    status = getattr(native.require(), function)(
        ctypes.byref(window), CELLS[kind].number, int(product == torch.bfloat16)
    )
    if status != 0:
        raise MemoryError(f"no memory for a window of {window.num_steps} steps of {window.num_rows} rows")


def plain(part: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor | None:
    """A part as native code reads it: row after row, in the format given."""
    return None if part is None else part.detach().to(dtype).contiguous()
