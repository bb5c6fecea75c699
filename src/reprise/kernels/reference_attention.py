"""The definition of correct attention: one position after the other in plain PyTorch, differentiated by autograd.

The faster forms in `attention.py` have the names and signatures below and are compared with these functions.

Scaled dot-product attention with heads (Vaswani et al. 2017, section 3.2) and rotary positions (RoFormer, Su et al.
2021, section 3.4.2): a head's units i and K/2 + i are one complex number, which a distance of a positions turns by
a * BASE^(-2i/K) radians. A score depends on the distance of query and key and on nothing else, so a key is cached as it
was made, unturned, and stays right however far the text goes on.

Number formats: operands of the two products are rounded to the query's format, sums and softmax run in fp32 (fp64 where
the query is fp64), outputs come in the query's format.

Legend: B rows, T positions of a window, C slots of the cache, S positions that can be heard, D width, H heads,
K = D / H.
"""

import torch
from torch import Tensor

from reprise.kernels.products import state_dtype

ROTARY_BASE = 10_000.0

State = tuple[Tensor, ...]


def attention(
    query_BTD: Tensor, key_BTD: Tensor, value_BTD: Tensor, state: State, reset_BT: Tensor | None, *, num_heads: int
) -> tuple[Tensor, State]:
    """A position hears itself and the C positions before it, those of its own document only.

    ::

        score_a = q_t . turned(k_{t-a}, by a back) / sqrt(K)        a = 0 .. min(C, positions of the document so far)
        y_t     = sum over a of softmax(score)_a v_{t-a}

    Args:
        query_BTD, key_BTD, value_BTD: [B, T, D], heads side by side.
        state: keys [B, C, D], values [B, C, D], newest last, and how many of the slots are filled [B]; fp32. The other
            slots are zero, so that all zeros is an empty cache.
        reset_BT: bool, or None. Where true, that row's cache is empty before that position.
        num_heads: divides D; D / num_heads is even.

    Returns:
        [B, T, D], and the state after the last position.
    """
    keys_BCD, values_BCD, filled_B = state
    context = keys_BCD.shape[1]
    age_S = torch.arange(context, -1, -1, device=query_BTD.device)
    outputs = []
    for t in range(query_BTD.shape[1]):
        if reset_BT is not None:
            keys_BCD = keys_BCD.masked_fill(reset_BT[:, t, None, None], 0.0)
            values_BCD = values_BCD.masked_fill(reset_BT[:, t, None, None], 0.0)
            filled_B = filled_B.masked_fill(reset_BT[:, t], 0.0)
        keys_BSD = torch.cat((keys_BCD, key_BTD[:, t, None].to(keys_BCD.dtype)), dim=1)
        values_BSD = torch.cat((values_BCD, value_BTD[:, t, None].to(values_BCD.dtype)), dim=1)
        heard_BS = age_S <= filled_B.unsqueeze(1)
        outputs.append(_attend(query_BTD[:, t], keys_BSD, values_BSD, heard_BS, distance_S=-age_S, num_heads=num_heads))
        keys_BCD, values_BCD = keys_BSD[:, 1:], values_BSD[:, 1:]
        filled_B = (filled_B + 1.0).clamp_max(context)
    return torch.stack(outputs, dim=1), (keys_BCD, values_BCD, filled_B)


def document_attention(
    query_BTD: Tensor, key_BTD: Tensor, value_BTD: Tensor, reset_BT: Tensor | None, *, num_heads: int
) -> Tensor:
    """A position hears every position of its own document in the window, before it and after it: [B, T, D].

    Arguments as for `attention`; a document begins where `reset_BT` is true.
    """
    num_steps = query_BTD.shape[1]
    steps_T = torch.arange(num_steps, device=query_BTD.device)
    begins_BT = torch.zeros_like(query_BTD[..., 0], dtype=torch.bool) if reset_BT is None else reset_BT
    document_BT = begins_BT.cumsum(dim=1)
    outputs = []
    for t in range(num_steps):
        heard_BT = document_BT == document_BT[:, t, None]
        outputs.append(
            _attend(query_BTD[:, t], key_BTD, value_BTD, heard_BT, distance_S=steps_T - t, num_heads=num_heads)
        )
    return torch.stack(outputs, dim=1)


def _attend(
    query_BD: Tensor, keys_BSD: Tensor, values_BSD: Tensor, heard_BS: Tensor, *, distance_S: Tensor, num_heads: int
) -> Tensor:
    """What one position hears, [B, D]; `distance_S` is where the keys stand, seen from it."""
    product, kept = query_BD.dtype, state_dtype(query_BD.dtype)
    query_BHK = query_BD.to(kept).view(len(query_BD), num_heads, -1)
    keys_BSHK = keys_BSD.to(product).to(kept).view(*keys_BSD.shape[:2], num_heads, -1)
    keys_BSHK = _turned(keys_BSHK, distance_S).to(product).to(kept)
    values_BSHK = values_BSD.to(product).to(kept).view(*values_BSD.shape[:2], num_heads, -1)
    score_BHS = torch.einsum("bhk,bshk->bhs", query_BHK, keys_BSHK) * query_BHK.shape[-1] ** -0.5
    weight_BHS = score_BHS.masked_fill(~heard_BS.unsqueeze(1), -torch.inf).softmax(dim=-1)
    return torch.einsum("bhs,bshk->bhk", weight_BHS, values_BSHK).flatten(1).to(product)


def _turned(x_BSHK: Tensor, distance_S: Tensor) -> Tensor:
    """Every head's complex numbers times exp(i * angle) of the position's distance."""
    half = x_BSHK.shape[-1] // 2
    speed = ROTARY_BASE ** (-torch.arange(half, dtype=x_BSHK.dtype, device=x_BSHK.device) / half)
    angle = distance_S.to(x_BSHK.dtype)[:, None, None] * speed
    turned = torch.complex(x_BSHK[..., :half], x_BSHK[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag), dim=-1)
