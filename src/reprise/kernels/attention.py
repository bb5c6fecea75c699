"""Attention over a whole window through PyTorch's fused `scaled_dot_product_attention`.

Names, signatures and results are those of `reference_attention.py`. What a position may hear is one boolean mask, which
every head shares; a masked position's weight is exactly zero, so what it holds reaches no bit of the output.

Legend: B rows, T positions of a window, C slots of the cache, S = C + T, D width, H heads, K = D / H.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from reprise.kernels.products import state_dtype
from reprise.kernels.reference_attention import ROTARY_BASE, State


def attention(
    query_BTD: Tensor, key_BTD: Tensor, value_BTD: Tensor, state: State, reset_BT: Tensor | None, *, num_heads: int
) -> tuple[Tensor, State]:
    """A position hears itself and the C before it in its document: shapes, equations in `reference_attention`."""
    keys_BCD, values_BCD, filled_B = state
    context, num_steps = keys_BCD.shape[1], query_BTD.shape[1]
    # The window's first position is number 0, so the cache holds the positions -C .. -1.
    position_S = torch.arange(-context, num_steps, device=query_BTD.device)
    position_C, position_T = position_S.split_with_sizes((context, num_steps))
    begin_BT = _begins(filled_B, reset_BT, position_T)
    heard_BTS = (position_S >= begin_BT.unsqueeze(-1)) & (position_S <= position_T.unsqueeze(-1))
    heard_BTS &= position_S >= (position_T - context).unsqueeze(-1)
    cached_BCD, recalled_BCD = keys_BCD.to(key_BTD.dtype), values_BCD.to(value_BTD.dtype)
    # Turned apart: the cache, which wants no gradient as a rule, is most of it.
    keys_BSHK = torch.cat((_turned(cached_BCD, position_C, num_heads), _turned(key_BTD, position_T, num_heads)), dim=1)
    values_BSD = torch.cat((recalled_BCD, value_BTD), dim=1)
    y_BTD = _attend(_turned(query_BTD, position_T, num_heads), keys_BSHK, values_BSD, heard_BTS)
    # The last C positions, without those of documents that ended: what a reset cuts off is gone for good.
    gone_BC1 = (position_S[num_steps:] < begin_BT[:, -1:]).unsqueeze(-1)
    last_keys_BCD = torch.cat((cached_BCD, key_BTD), dim=1)[:, num_steps:].masked_fill(gone_BC1, 0.0)
    last_values_BCD = values_BSD[:, num_steps:].masked_fill(gone_BC1, 0.0)
    last_filled_B = (num_steps - begin_BT[:, -1]).clamp_max(context)
    return y_BTD, (last_keys_BCD.to(keys_BCD.dtype), last_values_BCD.to(values_BCD.dtype), last_filled_B)


def document_attention(
    query_BTD: Tensor, key_BTD: Tensor, value_BTD: Tensor, reset_BT: Tensor | None, *, num_heads: int
) -> Tensor:
    """A position hears its whole document within the window: shapes, equations in `reference_attention`."""
    position_T = torch.arange(query_BTD.shape[1], device=query_BTD.device)
    heard_BTT = None
    if reset_BT is not None:
        document_BT = reset_BT.cumsum(dim=1)
        heard_BTT = document_BT.unsqueeze(-1) == document_BT.unsqueeze(-2)
    query_BTHK, key_BTHK = (_turned(part, position_T, num_heads) for part in (query_BTD, key_BTD))
    return _attend(query_BTHK, key_BTHK, value_BTD, heard_BTT)


def _begins(filled_B: Tensor, reset_BT: Tensor | None, position_T: Tensor) -> Tensor:
    """[B, T]: the position at which the document that a position belongs to begins, as far back as the cache goes."""
    begin_BT = -filled_B.unsqueeze(1).expand(-1, len(position_T))
    if reset_BT is not None:
        begin_BT = torch.where(reset_BT, position_T.to(filled_B.dtype), begin_BT).cummax(dim=1).values
    return begin_BT


def _attend(query_BTHK: Tensor, keys_BSHK: Tensor, values_BSD: Tensor, heard_BTS: Tensor | None) -> Tensor:
    """What all positions hear, [B, T, D], from turned queries and keys."""
    values_BSHK = values_BSD.view(*values_BSD.shape[:2], *query_BTHK.shape[2:])
    query_BHTK, keys_BHSK, values_BHSK = (part.transpose(1, 2) for part in (query_BTHK, keys_BSHK, values_BSHK))
    mask_B1TS = None if heard_BTS is None else heard_BTS.unsqueeze(1)
    y_BHTK = scaled_dot_product_attention(query_BHTK, keys_BHSK, values_BHSK, attn_mask=mask_B1TS)
    return y_BHTK.transpose(1, 2).flatten(2)


def _turned(x_BSD: Tensor, position_S: Tensor, num_heads: int) -> Tensor:
    """[B, S, H, K]: every head's pairs of units turned by the angle of their position, in fp32, in the format of x."""
    x_BSHK = x_BSD.view(*x_BSD.shape[:2], num_heads, -1)
    kept, half = state_dtype(x_BSD.dtype), x_BSHK.shape[-1] // 2
    speed = ROTARY_BASE ** (-torch.arange(half, dtype=kept, device=x_BSD.device) / half)
    angle_S1K = (position_S.to(kept).unsqueeze(-1) * speed).unsqueeze(1)
    cos, sin = angle_S1K.cos(), angle_S1K.sin()
    first, second = x_BSHK[..., :half], x_BSHK[..., half:]
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).to(x_BSD.dtype)
