"""The definition of correct: recurrent cells as a loop over time in plain PyTorch, differentiated by autograd.

Every faster implementation has the names and signatures below and is compared with these functions.

Legend: B rows, T time, D width, E input width, V vocabulary, N tokens, G all gates side by side (a multiple of D),
K units that a unit hears from.

The recurrent product `R h` has three structures, told apart by the second dimension of the recurrent weight [G, K]:

- full, K = D: (R h)_d = sum over all units k of R[d, k] h_k;
- block, K = D / heads: the same over the K units of the head that d is in, head d // K, so that R is block-diagonal
  (the heads of the sLSTM, Beck et al. 2024, section 2.2; within a head the units mix, between heads they do not);
- diagonal, K = 1: (R h)_d = R[d] h_d, elementwise (IndRNN, Li et al. 2018; ParaRNN, Danieli et al. 2025, for LSTM and
  GRU; QRNN, Bradbury et al. 2017, goes further and has no recurrent product at all).

Number formats: matrix products in `products.product_dtype` (the weights' own, or autocast's), everything else and the
carried state in fp32 (fp64 where the weights are fp64). Outputs come in the products' format. A diagonal recurrence is
no matrix product: it multiplies the state and the weight as they are, in fp32.

Resets: where `reset_BT` is true, that row's state is zero before that position is read, exactly.
"""

from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, layer_norm

from reprise.kernels.products import mixed_linear, product_dtype, recurrence_structure, state_dtype

NORM_EPSILON = 1e-5
IGNORE = -100

State = tuple[Tensor, ...]


class LstmWeights(NamedTuple):
    """Gates in the order o, f, i, z; coupled gates have no i. The norm's pair and the skip are None when off."""

    input_GE: Tensor
    recurrent_GK: Tensor
    bias_G: Tensor
    norm_scale_D: Tensor | None = None
    norm_shift_D: Tensor | None = None
    skip_scale_D: Tensor | None = None


class GruWeights(NamedTuple):
    """Gates in the order r, z, n. `candidate_bias_D` is the bias inside the reset gate's product."""

    input_GE: Tensor
    recurrent_GK: Tensor
    bias_G: Tensor
    candidate_bias_D: Tensor
    norm_scale_D: Tensor | None = None
    norm_shift_D: Tensor | None = None
    skip_scale_D: Tensor | None = None


Weights = TypeVar("Weights", LstmWeights, GruWeights)


def lstm(
    x_BTE: Tensor,
    state: State,
    reset_BT: Tensor | None,
    weights: LstmWeights,
    *,
    coupled_gates: bool,
) -> tuple[Tensor, State]:
    """LSTM with three switches (Hochreiter and Schmidhuber 1997, forget gate of Gers et al. 2000).

    a_t = W x_t + R h_{t-1} + b;  o, f, i = sigmoid(a), z = tanh(a)
    c_t = f * c_{t-1} + i * z            coupled gates: i = 1 - f (Greff et al. 2017, CIFG)
    u_t = o * tanh(c_t)                  temporal residual: u_t = o * tanh(c_t) + s * h_{t-1}, s learned, a unit each
    h_t = u_t                            layer norm: h_t = LayerNorm(u_t)

    x [B, T, E], state (h [B, D], c [B, D]), reset [B, T] bool or None. Returns (y [B, T, D], (h, c) after the last
    position). Raises UserError for a recurrent weight of another shape than those above.
    """
    product = product_dtype(weights.recurrent_GK)
    weights = _with_kept_vectors(weights, state_dtype(product))
    hidden_BD, cell_BD = (part.to(state_dtype(product)) for part in state)
    outputs = []
    with torch.autocast(x_BTE.device.type, enabled=False):
        drive_BTG = mixed_linear(x_BTE, weights.input_GE, product) + weights.bias_G
        for t in range(x_BTE.shape[1]):
            if reset_BT is not None:
                hidden_BD = hidden_BD.masked_fill(reset_BT[:, t, None], 0.0)
                cell_BD = cell_BD.masked_fill(reset_BT[:, t, None], 0.0)
            gates_BG = drive_BTG[:, t] + _recurrent_product(hidden_BD, weights.recurrent_GK, product)
            if coupled_gates:
                o_BD, f_BD, z_BD = gates_BG.chunk(3, dim=-1)
                f_BD = torch.sigmoid(f_BD)
                i_BD = 1.0 - f_BD
            else:
                o_BD, f_BD, i_BD, z_BD = gates_BG.chunk(4, dim=-1)
                f_BD, i_BD = torch.sigmoid(f_BD), torch.sigmoid(i_BD)
            cell_BD = f_BD * cell_BD + i_BD * torch.tanh(z_BD)
            update_BD = torch.sigmoid(o_BD) * torch.tanh(cell_BD)
            hidden_BD = _hidden(update_BD, hidden_BD, weights)
            outputs.append(hidden_BD.to(product))
    return torch.stack(outputs, dim=1), (hidden_BD, cell_BD)


def gru(x_BTE: Tensor, state: State, reset_BT: Tensor | None, weights: GruWeights) -> tuple[Tensor, State]:
    """GRU (Cho et al. 2014) with the equations of torch.nn.GRU, and two switches.

    r, z = sigmoid(W x_t + b + R h_{t-1})
    n = tanh(W x_t + b + r * (R h_{t-1} + b_candidate))
    u_t = (1 - z) * n + z * h_{t-1}      temporal residual: u_t = (1 - z) * n + z * h_{t-1} + s * h_{t-1}, s learned
    h_t = u_t                            layer norm: h_t = LayerNorm(u_t)

    x [B, T, E], state (h [B, D],), reset [B, T] bool or None. Returns (y [B, T, D], (h,) after the last position).
    Raises UserError for a recurrent weight of another shape than those above.
    """
    product = product_dtype(weights.recurrent_GK)
    weights = _with_kept_vectors(weights, state_dtype(product))
    hidden_BD = state[0].to(state_dtype(product))
    outputs = []
    with torch.autocast(x_BTE.device.type, enabled=False):
        drive_BTG = mixed_linear(x_BTE, weights.input_GE, product) + weights.bias_G
        for t in range(x_BTE.shape[1]):
            if reset_BT is not None:
                hidden_BD = hidden_BD.masked_fill(reset_BT[:, t, None], 0.0)
            drive_r_BD, drive_z_BD, drive_n_BD = drive_BTG[:, t].chunk(3, dim=-1)
            r_BD, z_BD, n_BD = _recurrent_product(hidden_BD, weights.recurrent_GK, product).chunk(3, dim=-1)
            r_BD = torch.sigmoid(drive_r_BD + r_BD)
            z_BD = torch.sigmoid(drive_z_BD + z_BD)
            n_BD = torch.tanh(drive_n_BD + r_BD * (n_BD + weights.candidate_bias_D))
            update_BD = (1.0 - z_BD) * n_BD + z_BD * hidden_BD
            hidden_BD = _hidden(update_BD, hidden_BD, weights)
            outputs.append(hidden_BD.to(product))
    return torch.stack(outputs, dim=1), (hidden_BD,)


def _with_kept_vectors(weights: Weights, kept: torch.dtype) -> Weights:
    """Biases, norm and skip in the kept format: cast once, so that autograd sums their gradients over time in it."""
    present = {name: part for name, part in weights._asdict().items() if part is not None}
    return weights._replace(**{name: part.to(kept) for name, part in present.items() if part.dim() == 1})


def _recurrent_product(hidden_BD: Tensor, recurrent_GK: Tensor, product: torch.dtype) -> Tensor:
    """R h for all gates [B, G], in the kept format, in the structure that the weight's shape says."""
    num_rows, width = hidden_BD.shape
    structure = recurrence_structure(recurrent_GK, width)
    if structure == "full":
        return mixed_linear(hidden_BD, recurrent_GK, product)
    if structure == "diagonal":
        weight_XD = recurrent_GK.to(hidden_BD.dtype).view(-1, width)
        return (weight_XD * hidden_BD.unsqueeze(1)).flatten(1)
    heard = recurrent_GK.shape[1]
    hidden_BHK = hidden_BD.to(product).view(num_rows, width // heard, heard)
    weight_XHDK = recurrent_GK.to(product).view(-1, width // heard, heard, heard)
    product_BXHD = torch.einsum("bhk,xhdk->bxhd", hidden_BHK, weight_XHDK)
    return product_BXHD.flatten(1).to(hidden_BD.dtype)


def _hidden(update_BD: Tensor, previous_BD: Tensor, weights: LstmWeights | GruWeights) -> Tensor:
    """The hidden state from a cell's update: skip between adjacent time steps first, then the norm."""
    if weights.skip_scale_D is not None:
        update_BD = update_BD + weights.skip_scale_D * previous_BD
    if weights.norm_scale_D is None or weights.norm_shift_D is None:
        return update_BD
    return layer_norm(update_BD, (update_BD.shape[-1],), weights.norm_scale_D, weights.norm_shift_D, NORM_EPSILON)


def linear_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor,
    targets_N: Tensor,
    *,
    chunk_tokens: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Summed negative log-likelihood of `targets` under softmax(weight hidden + bias): a scalar, fp32 or fp64.

    Targets equal to IGNORE count nothing. All logits are materialised; `chunk_tokens` is for the twin in `loss.py`.

    `label_smoothing` gives that share of a target's weight to all words alike (Szegedy et al. 2016, section 7);
    `z_loss` adds that multiple of (log sum exp of the logits)^2 a token, which keeps logits from drifting (PaLM,
    Chowdhery et al. 2022, section 5). Both are off at zero.
    """
    product = product_dtype(weight_VD)
    with torch.autocast(hidden_ND.device.type, enabled=False):
        logits_NV = mixed_linear(hidden_ND, weight_VD, product) + bias_V
        total = cross_entropy(
            logits_NV, targets_N, ignore_index=IGNORE, reduction="sum", label_smoothing=label_smoothing
        )
        if z_loss == 0.0:
            return total
        log_sum_N = torch.logsumexp(logits_NV, dim=1).masked_fill(targets_N == IGNORE, 0.0)
        return total + z_loss * log_sum_N.square().sum()
