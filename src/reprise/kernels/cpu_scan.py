"""Linear scan and the cells on it in native code: gates, scan and outputs in one pass through memory, on the CPU.

The names, signatures and results are those of `reference_scan.py`, in fp32, and in bf16 with fp32 arithmetic and state.
The product that makes the gates stays PyTorch's, one for the whole window; `csrc/scan.cpp` does the rest. Its two
passes are registered as custom operators, so that autograd, autocast and torch.compile take them for operators of
PyTorch's own. With the gates left to PyTorch's operations around a native scan, what is not product took four to six
times as long (32 rows, 128 steps, 512 units, one core with AVX-512).

In bf16 backward reads the states of the window as the outputs keep them, rounded to bf16.

Legend: B rows, T time, D width, G all gates side by side.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear as dense

from reprise.kernels import native
from reprise.kernels.products import product_dtype
from reprise.kernels.reference import State
from reprise.kernels.reference_scan import MinimalWeights, RgLruWeights, decay_rate

# The numbers that scan.cpp knows its cells by; 0 is the scan itself.
_CELLS = {"mingru": 1, "minlstm": 2, "rglru": 3}
_PLAIN = 0


def linear_scan(decay_BTD: Tensor, value_BTD: Tensor, initial_BD: Tensor, reset_BT: Tensor | None) -> Tensor:
    """h_t = a_t * h_{t-1} + v_t: shapes, formats and resets as in `reference_scan.linear_scan`; fp32 or bf16 in."""
    common = torch.promote_types(decay_BTD.dtype, value_BTD.dtype)
    native.check_format(torch.promote_types(common, initial_BD.dtype))
    states_BTD: Tensor = _scan(decay_BTD.to(common), value_BTD.to(common), initial_BD.float(), reset_BT)
    return states_BTD


def mingru(x_BTE: Tensor, state: State, reset_BT: Tensor | None, weights: MinimalWeights) -> tuple[Tensor, State]:
    """minGRU: shapes and equations in `reference_scan.mingru`."""
    return _run("mingru", x_BTE, state, reset_BT, weights, None)


def minlstm(x_BTE: Tensor, state: State, reset_BT: Tensor | None, weights: MinimalWeights) -> tuple[Tensor, State]:
    """minLSTM: shapes and equations in `reference_scan.minlstm`."""
    return _run("minlstm", x_BTE, state, reset_BT, weights, None)


def rglru(x_BTE: Tensor, state: State, reset_BT: Tensor | None, weights: RgLruWeights) -> tuple[Tensor, State]:
    """RG-LRU: shapes and equations in `reference_scan.rglru`."""
    return _run("rglru", x_BTE, state, reset_BT, weights, decay_rate(weights.decay_logit_D))


def _run(
    cell: str,
    x_BTE: Tensor,
    state: State,
    reset_BT: Tensor | None,
    weights: MinimalWeights | RgLruWeights,
    rate_D: Tensor | None,
) -> tuple[Tensor, State]:
    product = product_dtype(weights.input_GE)
    native.check_format(product)
    with torch.autocast(x_BTE.device.type, enabled=False):
        gates_BTG = dense(x_BTE.to(product), weights.input_GE.to(product))
        y_BTD, last_BD = _cell(cell, gates_BTG, weights.bias_G.float(), rate_D, state[0].float(), reset_BT)
    return y_BTD, (last_BD,)


@torch.library.custom_op("reprise::linear_scan", mutates_args=(), device_types="cpu")
def _scan(decay_BTD: Tensor, value_BTD: Tensor, initial_BD: Tensor, reset_BT: Tensor | None) -> Tensor:
    assert value_BTD.shape == decay_BTD.shape
    blocks = (decay_BTD.contiguous(), value_BTD.contiguous())
    states_BTD = torch.empty_like(blocks[1], dtype=torch.float32)
    call = _Call(_PLAIN, blocks, None, None, initial_BD, reset_BT)
    call.forward(states_BTD, torch.empty_like(call.initial_BD))
    return states_BTD


@torch.library.custom_op("reprise::linear_scan_backward", mutates_args=(), device_types="cpu")
def _scan_backward(
    decay_BTD: Tensor, initial_BD: Tensor, reset_BT: Tensor | None, states_BTD: Tensor, grad_states_BTD: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    decay_BTD = decay_BTD.contiguous()
    gradients = (torch.empty_like(decay_BTD), torch.empty_like(decay_BTD))
    grad_initial_BD = torch.zeros_like(initial_BD, memory_format=torch.contiguous_format)
    # The values themselves have no part in any gradient: any memory of their shape will do.
    call = _Call(_PLAIN, (decay_BTD, decay_BTD), None, None, initial_BD, reset_BT)
    call.backward(states_BTD, grad_states_BTD, gradients, None, None, grad_initial_BD)
    return *gradients, grad_initial_BD


@torch.library.custom_op("reprise::scan_cell", mutates_args=(), device_types="cpu")
def _cell(
    cell: str, gates_BTG: Tensor, bias_G: Tensor, rate_D: Tensor | None, initial_BD: Tensor, reset_BT: Tensor | None
) -> tuple[Tensor, Tensor]:
    gates_BTG = gates_BTG.contiguous()
    y_BTD = gates_BTG.new_empty((*gates_BTG.shape[:2], initial_BD.shape[1]))
    last_BD = torch.empty_like(initial_BD, memory_format=torch.contiguous_format)
    blocks = _side_by_side(gates_BTG, initial_BD.shape[1])
    _Call(_CELLS[cell], blocks, bias_G, rate_D, initial_BD, reset_BT).forward(y_BTD, last_BD)
    return y_BTD, last_BD


@torch.library.custom_op("reprise::scan_cell_backward", mutates_args=(), device_types="cpu")
def _cell_backward(
    cell: str,
    gates_BTG: Tensor,
    bias_G: Tensor,
    rate_D: Tensor | None,
    initial_BD: Tensor,
    reset_BT: Tensor | None,
    y_BTD: Tensor,
    grad_y_BTD: Tensor,
    grad_last_BD: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gates_BTG = gates_BTG.contiguous()
    num_rows, width = initial_BD.shape
    grad_gates_BTG = torch.empty_like(gates_BTG)
    # Sums over time, a row each.
    grad_bias_BG = bias_G.new_zeros((num_rows, *bias_G.shape))
    grad_rate_BD = None if rate_D is None else rate_D.new_zeros((num_rows, width))
    carried_BD = grad_last_BD.clone(memory_format=torch.contiguous_format)
    call = _Call(_CELLS[cell], _side_by_side(gates_BTG, width), bias_G, rate_D, initial_BD, reset_BT)
    gradients = _side_by_side(grad_gates_BTG, width)
    call.backward(y_BTD, grad_y_BTD, gradients, grad_bias_BG, grad_rate_BD, carried_BD)
    grad_rate_D = bias_G.new_zeros(0) if grad_rate_BD is None else grad_rate_BD.sum(dim=0)
    return grad_gates_BTG, grad_bias_BG.sum(dim=0), grad_rate_D, carried_BD


class _Call:
    """What both passes of scan.cpp are told alike. Holds the tensors for as long as their addresses are in use."""

    def __init__(
        self,
        cell: int,
        blocks: Sequence[Tensor],
        bias_G: Tensor | None,
        rate_D: Tensor | None,
        initial_BD: Tensor,
        reset_BT: Tensor | None,
    ) -> None:
        self._blocks, self.initial_BD = blocks, initial_BD.contiguous()
        self._bias_G = None if bias_G is None else bias_G.contiguous()
        self._rate_D = None if rate_D is None else rate_D.contiguous()
        self._reset_BT = None if reset_BT is None else reset_BT.contiguous()
        num_rows, num_steps, width = blocks[0].shape
        assert self.initial_BD.shape == (num_rows, width)
        assert reset_BT is None or (reset_BT.shape == (num_rows, num_steps) and reset_BT.dtype == torch.bool)
        self._library = native.require()
        is_bf16 = blocks[0].dtype == torch.bfloat16
        self._shared = (
            *map(ctypes.c_int, (cell, is_bf16, torch.get_num_threads())),
            *map(ctypes.c_int64, (num_rows, num_steps, width)),
            _addresses(blocks),
            # From one step to the next: gates lie side by side, or each in a tensor of its own.
            ctypes.c_int64(width if cell == _PLAIN else width * len(blocks)),
            *map(_address, (self._bias_G, self._rate_D, self.initial_BD, self._reset_BT)),
        )

    def forward(self, outputs_BTD: Tensor, last_BD: Tensor) -> None:
        """Fill the outputs and the last state."""
        self._library.reprise_scan_forward(*self._shared, _address(outputs_BTD), _address(last_BD))

    def backward(
        self,
        outputs_BTD: Tensor,
        grad_outputs_BTD: Tensor,
        gradients: Sequence[Tensor],
        grad_bias_BG: Tensor | None,
        grad_rate_BD: Tensor | None,
        carried_BD: Tensor,
    ) -> None:
        """Fill the gates' gradients, add to bias's and rate's; `carried` turns from the last state's to the first's."""
        outputs_BTD, grad_outputs_BTD = outputs_BTD.contiguous(), grad_outputs_BTD.contiguous()
        self._library.reprise_scan_backward(
            *self._shared,
            _address(outputs_BTD),
            _address(grad_outputs_BTD),
            _addresses(gradients),
            *map(_address, (grad_bias_BG, grad_rate_BD, carried_BD)),
        )


def _side_by_side(gates_BTG: Tensor, width: int) -> tuple[Tensor, ...]:
    """The gates' blocks [B, T, D], without a copy."""
    return gates_BTG.chunk(gates_BTG.shape[-1] // width, dim=-1)


def _address(part: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if part is None else part.data_ptr())


def _addresses(parts: Sequence[Tensor]) -> Any:
    return (ctypes.c_void_p * len(parts))(*(part.data_ptr() for part in parts))


@_scan.register_fake
def _(decay_BTD: Tensor, value_BTD: Tensor, initial_BD: Tensor, reset_BT: Tensor | None) -> Tensor:
    return torch.empty_like(value_BTD, dtype=torch.float32, memory_format=torch.contiguous_format)


@_scan_backward.register_fake
def _(
    decay_BTD: Tensor, initial_BD: Tensor, reset_BT: Tensor | None, states_BTD: Tensor, grad_states_BTD: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    gradient_BTD = decay_BTD.new_empty(decay_BTD.shape)
    return gradient_BTD, torch.empty_like(gradient_BTD), initial_BD.new_empty(initial_BD.shape)


@_cell.register_fake
def _(
    cell: str, gates_BTG: Tensor, bias_G: Tensor, rate_D: Tensor | None, initial_BD: Tensor, reset_BT: Tensor | None
) -> tuple[Tensor, Tensor]:
    y_BTD = gates_BTG.new_empty((*gates_BTG.shape[:2], initial_BD.shape[1]))
    return y_BTD, initial_BD.new_empty(initial_BD.shape)


@_cell_backward.register_fake
def _(
    cell: str,
    gates_BTG: Tensor,
    bias_G: Tensor,
    rate_D: Tensor | None,
    initial_BD: Tensor,
    reset_BT: Tensor | None,
    y_BTD: Tensor,
    grad_y_BTD: Tensor,
    grad_last_BD: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_rate_D = bias_G.new_empty((0,) if rate_D is None else rate_D.shape)
    gradients = (gates_BTG.new_empty(gates_BTG.shape), torch.empty_like(bias_G))
    return *gradients, grad_rate_D, initial_BD.new_empty(initial_BD.shape)


def _keep_scan(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    decay_BTD, _, initial_BD, reset_BT = inputs
    # A copy, since who carries a state may write the next one over it before backward.
    ctx.save_for_backward(decay_BTD, initial_BD.clone(), reset_BT, output)


def _differentiate_scan(ctx: Any, grad_states_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    gradients = _scan_backward(*ctx.saved_tensors, grad_states_BTD)
    return *gradients, None


def _keep_cell(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.cell, gates_BTG, bias_G, rate_D, initial_BD, reset_BT = inputs
    ctx.save_for_backward(gates_BTG, bias_G, rate_D, initial_BD.clone(), reset_BT, output[0])


def _differentiate_cell(ctx: Any, grad_y_BTD: Tensor, grad_last_BD: Tensor) -> tuple[Any, ...]:
    rate_D = ctx.saved_tensors[2]
    grad_gates_BTG, grad_bias_G, grad_rate_D, grad_initial_BD = _cell_backward(
        ctx.cell, *ctx.saved_tensors, grad_y_BTD, grad_last_BD
    )
    return None, grad_gates_BTG, grad_bias_G, None if rate_D is None else grad_rate_D, grad_initial_BD, None


_scan.register_autograd(_differentiate_scan, setup_context=_keep_scan)
_cell.register_autograd(_differentiate_cell, setup_context=_keep_cell)
