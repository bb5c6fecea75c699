"""The definition of correct for linear recurrences and the cells on them, differentiated by autograd.

In these cells no gate hears the hidden state, so all gates of a window come from one product, and what is left over
time is h_t = a_t * h_{t-1} + v_t, unit by unit: a linear scan. Faster implementations have the names and signatures
below and are compared with these functions.

Legend: B rows, T time, D width, E input width, G all gates side by side (a multiple of D).

Number formats and resets are those of `reference.py`: products in `products.product_dtype`, everything else and the
state in fp32 (fp64 where the weights are fp64); a row's state is zero before a position where `reset_BT` is true, and
nothing of what stood before, not even NaN, comes through.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

from reprise.kernels.products import mixed_linear, product_dtype, state_dtype
from reprise.kernels.reference import State

# The exponent c of the RG-LRU's decay (De et al. 2024, section 2.4).
DECAY_POWER = 8.0
# What 1 - a^2 counts as at least: the root of a smaller number would have a slope that overflows.
SMALLEST_SQUARE = 1e-24


class MinimalWeights(NamedTuple):
    """minGRU: gates in the order z, n. minLSTM: f, i, n."""

    input_GE: Tensor
    bias_G: Tensor


class RgLruWeights(NamedTuple):
    """Gates in the order r, i, u. Where r is one, the state decays by sigmoid(decay_logit)^c a step."""

    input_GE: Tensor
    bias_G: Tensor
    decay_logit_D: Tensor


Scan = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
Terms = Callable[[Tensor, MinimalWeights | RgLruWeights], tuple[Tensor, Tensor]]


def linear_scan(decay_BTD: Tensor, value_BTD: Tensor, initial_BD: Tensor, reset_BT: Tensor | None) -> Tensor:
    """h_t = a_t * h_{t-1} + v_t with h_{-1} = initial, the state zeroed before t where `reset_BT` (bool) is true.

    decay, value [B, T, D] in any format, initial [B, D]. Returns h [B, T, D] in fp32, or fp64 where an input is fp64.
    """
    kept = scan_dtype(decay_BTD, value_BTD, initial_BD)
    state_BD = initial_BD.to(kept)
    states = []
    for t in range(value_BTD.shape[1]):
        if reset_BT is not None:
            state_BD = state_BD.masked_fill(reset_BT[:, t, None], 0.0)
        state_BD = decay_BTD[:, t].to(kept) * state_BD + value_BTD[:, t].to(kept)
        states.append(state_BD)
    return torch.stack(states, dim=1)


def scan_dtype(*parts: Tensor) -> torch.dtype:
    """What a scan over `parts` accumulates and answers in: fp32, or fp64 where one of them is fp64."""
    return torch.float64 if any(part.dtype == torch.float64 for part in parts) else torch.float32


def mingru(x_BTE: Tensor, state: State, reset_BT: Tensor | None, weights: MinimalWeights) -> tuple[Tensor, State]:
    """minGRU (Feng et al. 2024, arXiv:2410.01201, section 3.1).

    z = sigmoid(W_z x_t + b_z);  n = W_n x_t + b_n
    h_t = (1 - z) * h_{t-1} + z * n

    x [B, T, E], state (h [B, D],), reset [B, T] bool or None. Returns (y [B, T, D], (h,) after the last position).
    """
    return scan_cell(x_BTE, state, reset_BT, weights, terms=mingru_terms, scan=linear_scan)


def minlstm(x_BTE: Tensor, state: State, reset_BT: Tensor | None, weights: MinimalWeights) -> tuple[Tensor, State]:
    """minLSTM, the form whose two gates add up to one (Feng et al. 2024, arXiv:2410.01201, section 3.2).

    f, i = sigmoid(W x_t + b);  n = W_n x_t + b_n
    h_t = f / (f + i) * h_{t-1} + i / (f + i) * n

    Shapes as in `mingru`.
    """
    return scan_cell(x_BTE, state, reset_BT, weights, terms=minlstm_terms, scan=linear_scan)


def rglru(x_BTE: Tensor, state: State, reset_BT: Tensor | None, weights: RgLruWeights) -> tuple[Tensor, State]:
    """Real-gated linear recurrent unit, RG-LRU (De et al. 2024, Griffin, arXiv:2402.19427, section 2.4).

    r, i = sigmoid(W x_t + b);  u = W_u x_t + b_u
    a = sigmoid(decay_logit)^(c r), c = 8
    h_t = a * h_{t-1} + sqrt(1 - a^2) * (i * u)

    Shapes as in `mingru`. u stands for the linear layer that the paper's recurrent block has before the unit.
    """
    return scan_cell(x_BTE, state, reset_BT, weights, terms=rglru_terms, scan=linear_scan)


def scan_cell(
    x_BTE: Tensor,
    state: State,
    reset_BT: Tensor | None,
    weights: MinimalWeights | RgLruWeights,
    *,
    terms: Terms,
    scan: Scan,
) -> tuple[Tensor, State]:
    """A cell whose gates (the sums before any sigmoid) give decay and value of a scan through `terms`."""
    product = product_dtype(weights.input_GE)
    with torch.autocast(x_BTE.device.type, enabled=False):
        gates_BTG = mixed_linear(x_BTE, weights.input_GE, product) + weights.bias_G
        decay_BTD, value_BTD = terms(gates_BTG, weights)
        h_BTD = scan(decay_BTD, value_BTD, state[0], reset_BT)
        # A copy, so that a carried state does not keep a whole window in memory.
        return h_BTD.to(product), (h_BTD[:, -1].clone(),)


def mingru_terms(gates_BTG: Tensor, weights: MinimalWeights | RgLruWeights) -> tuple[Tensor, Tensor]:
    """1 - z and z * n. The decay is sigmoid(-a), which keeps its digits where 1 - sigmoid(a) loses them."""
    z_BTD, n_BTD = gates_BTG.chunk(2, dim=-1)
    return torch.sigmoid(-z_BTD), torch.sigmoid(z_BTD) * n_BTD


def minlstm_terms(gates_BTG: Tensor, weights: MinimalWeights | RgLruWeights) -> tuple[Tensor, Tensor]:
    """f / (f + i) and i / (f + i) * n. The share is sigmoid(log f - log i), which has no zero to divide by."""
    f_BTD, i_BTD, n_BTD = gates_BTG.chunk(3, dim=-1)
    balance_BTD = logsigmoid(f_BTD) - logsigmoid(i_BTD)
    return torch.sigmoid(balance_BTD), torch.sigmoid(-balance_BTD) * n_BTD


def rglru_terms(gates_BTG: Tensor, weights: MinimalWeights | RgLruWeights) -> tuple[Tensor, Tensor]:
    """a and sqrt(1 - a^2) * i * u.

    With a = exp(-rate r), 1 - a^2 is -expm1(-2 rate r), which keeps its digits where a is close to one.
    """
    assert isinstance(weights, RgLruWeights)
    r_BTD, i_BTD, u_BTD = gates_BTG.chunk(3, dim=-1)
    exponent_BTD = decay_rate(weights.decay_logit_D) * torch.sigmoid(r_BTD)
    gain_BTD = torch.expm1(-2.0 * exponent_BTD).neg().clamp_min(SMALLEST_SQUARE).sqrt()
    return torch.exp(-exponent_BTD), gain_BTD * torch.sigmoid(i_BTD) * u_BTD


def decay_rate(decay_logit_D: Tensor) -> Tensor:
    """-c log sigmoid(decay_logit), fp32 or fp64: where r is one, the state decays by exp(-rate) a step."""
    return DECAY_POWER * softplus(-decay_logit_D.to(state_dtype(decay_logit_D.dtype)))
