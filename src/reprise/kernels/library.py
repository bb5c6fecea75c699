"""PyTorch's own recurrent layers behind the signatures of `reference.py`: the textbook cells, full, without switches.

Products run in the format asked for, cast here: under autocast on CPU the library's own layers would raise (LSTM in
float16) or come back in another format than they computed in (GRU in bf16).

The library has no resets inside a window. They are applied exactly by splitting the window at every position where
some row starts anew and zeroing the state of those rows, so many resets mean many short calls.

Legend: B rows, T time, D width, E input width, G all gates side by side.
"""

from itertools import pairwise

import torch
from torch import Tensor

from reprise.kernels.products import product_dtype, recurrence_structure, state_dtype
from reprise.kernels.reference import GruWeights, LstmWeights, State
from reprise.runtime import UserError

# Where each block of ours lies in the library's order: i, f, z, o.
_LSTM_ORDER = (2, 1, 3, 0)


def lstm(
    x_BTE: Tensor,
    state: State,
    reset_BT: Tensor | None,
    weights: LstmWeights,
    *,
    coupled_gates: bool,
) -> tuple[Tensor, State]:
    """torch.lstm; shapes as in `reference.lstm`. In bf16 it hands back a cell state rounded to bf16.

    Raises UserError for a recurrence that is not full.
    """
    assert not coupled_gates and weights.norm_scale_D is None and weights.skip_scale_D is None, "switches are ours only"
    _refuse_structure(weights.recurrent_GK, state[0].shape[1])
    product = product_dtype(weights.recurrent_GK)
    weight_list = _library_weights(weights, product, order=_LSTM_ORDER, hidden_bias_G=None)
    hidden_BD, cell_BD = state
    pieces = []
    with torch.autocast(x_BTE.device.type, enabled=False):
        for start, stop in _segments(reset_BT, x_BTE.shape[1]):
            hidden_BD, cell_BD = _reset((hidden_BD, cell_BD), reset_BT, start)
            carried = [hidden_BD.to(product)[None], cell_BD.to(product)[None]]
            y_BTD, hidden_1BD, cell_1BD = torch.lstm(
                x_BTE[:, start:stop].to(product), carried, weight_list, *_layer_settings()
            )
            hidden_BD, cell_BD = hidden_1BD[0], cell_1BD[0]
            pieces.append(y_BTD)
    kept = state_dtype(product)
    return torch.cat(pieces, dim=1), (hidden_BD.to(kept), cell_BD.to(kept))


def gru(x_BTE: Tensor, state: State, reset_BT: Tensor | None, weights: GruWeights) -> tuple[Tensor, State]:
    """torch.gru; shapes as in `reference.gru`. Raises UserError for a recurrence that is not full."""
    assert weights.norm_scale_D is None and weights.skip_scale_D is None, "switches are ours only"
    _refuse_structure(weights.recurrent_GK, state[0].shape[1])
    product = product_dtype(weights.recurrent_GK)
    candidate_bias_D = weights.candidate_bias_D
    gate_bias = candidate_bias_D.new_zeros(2 * candidate_bias_D.shape[0])
    hidden_bias_G = torch.cat((gate_bias, candidate_bias_D))
    weight_list = _library_weights(weights, product, order=(0, 1, 2), hidden_bias_G=hidden_bias_G)
    hidden_BD = state[0]
    pieces = []
    with torch.autocast(x_BTE.device.type, enabled=False):
        for start, stop in _segments(reset_BT, x_BTE.shape[1]):
            (hidden_BD,) = _reset((hidden_BD,), reset_BT, start)
            y_BTD, hidden_1BD = torch.gru(
                x_BTE[:, start:stop].to(product), hidden_BD.to(product)[None], weight_list, *_layer_settings()
            )
            hidden_BD = hidden_1BD[0]
            pieces.append(y_BTD)
    return torch.cat(pieces, dim=1), (hidden_BD.to(state_dtype(product)),)


def _refuse_structure(recurrent_GK: Tensor, width: int) -> None:
    structure = recurrence_structure(recurrent_GK, width)
    if structure != "full":
        raise UserError(
            f"implementation=library: has no {structure} recurrence; allowed: auto, native, triton, eager, reference"
        )


def _layer_settings() -> tuple[bool, int, float, bool, bool, bool]:
    """has_biases, num_layers, dropout, train, bidirectional, batch_first. Only `train` keeps what backward needs."""
    return True, 1, 0.0, torch.is_grad_enabled(), False, True


def _library_weights(
    weights: LstmWeights | GruWeights, product: torch.dtype, *, order: tuple[int, ...], hidden_bias_G: Tensor | None
) -> list[Tensor]:
    """The four weights in the library's gate order, as views of one block of memory, which is what cuDNN reads."""

    def blocks(weight: Tensor) -> list[Tensor]:
        parts = weight.to(product).chunk(len(order))
        return [parts[index].flatten() for index in order]

    if hidden_bias_G is None:
        hidden_bias_G = torch.zeros_like(weights.bias_G, requires_grad=False)
    sources = (weights.input_GE, weights.recurrent_GK, weights.bias_G, hidden_bias_G)
    flat = torch.cat([part for source in sources for part in blocks(source)])
    views = flat.split_with_sizes([source.numel() for source in sources])
    return [view.view(source.shape) for view, source in zip(views, sources, strict=True)]


def _segments(reset_BT: Tensor | None, num_steps: int) -> list[tuple[int, int]]:
    """[start, stop) pieces of the window; each starts at the window's start or where some row is reset."""
    if reset_BT is None:
        return [(0, num_steps)]
    inner_starts = [int(t) for t in reset_BT.any(dim=0).nonzero()[:, 0] if t > 0]
    edges = [0, *inner_starts, num_steps]
    return list(pairwise(edges))


def _reset(state: State, reset_BT: Tensor | None, t: int) -> State:
    if reset_BT is None:
        return state
    return tuple(part.masked_fill(reset_BT[:, t, None], 0.0) for part in state)
