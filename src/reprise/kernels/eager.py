"""Recurrent cells with a hand-derived backward in plain PyTorch operations: no compiler needed, every device.

The names, signatures and results are those of `reference.py`. Where the time goes, and what is done about it:

- the input's share of all gates is one product over the whole window, and so are the weight gradients;
- a time step is one product with a weight laid out once (`eager_recurrence.py`) and a handful of fused operations that
  write into buffers allocated once a window (`window.py`);
- backward multiplies incoming gradients by local slopes, which are computed for several steps at once while they are
  still in cache, so that a step of backward holds no transcendental function and few operations.

The windows themselves are in `eager_lstm.py` and `eager_gru.py`.

Legend: B rows, T time, D width, E input width.
"""

import torch
from torch import Tensor

from reprise.kernels.eager_gru import Gru
from reprise.kernels.eager_lstm import Lstm
from reprise.kernels.products import product_dtype
from reprise.kernels.reference import GruWeights, LstmWeights, State


def lstm(
    x_BTE: Tensor,
    state: State,
    reset_BT: Tensor | None,
    weights: LstmWeights,
    *,
    coupled_gates: bool,
) -> tuple[Tensor, State]:
    """LSTM with all switches and recurrences: shapes, equations, errors in `reference.lstm`."""
    product = product_dtype(weights.recurrent_GK)
    with torch.autocast(x_BTE.device.type, enabled=False):
        y_BTD, *last = Lstm.apply(x_BTE, *state, reset_BT, *weights, coupled_gates, product)  # type: ignore[no-untyped-call]
    return y_BTD, tuple(last)


def gru(x_BTE: Tensor, state: State, reset_BT: Tensor | None, weights: GruWeights) -> tuple[Tensor, State]:
    """GRU with all switches and recurrences: shapes, equations, errors in `reference.gru`."""
    product = product_dtype(weights.recurrent_GK)
    with torch.autocast(x_BTE.device.type, enabled=False):
        y_BTD, hidden_BD = Gru.apply(x_BTE, *state, reset_BT, *weights, product)  # type: ignore[no-untyped-call]
    return y_BTD, (hidden_BD,)
