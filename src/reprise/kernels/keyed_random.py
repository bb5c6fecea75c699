"""Random numbers as a pure function of int64 keys: no generator, no order of drawing, the same on every device.

A generator gives a row numbers that depend on which other rows were drawn before it. Here a row's numbers depend on its
own key only, so a mask stays the same when rows move to another rank, another group or another batch size.

The function is splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014): a counter
multiplied by the golden gamma, then the 64-bit finaliser mix13. int64 products wrap around modulo 2^64, which is what
the finaliser needs; shifts are made logical by masking off the copies of the sign.
"""

import torch
from torch import Tensor


def _as_int64(value: int) -> int:
    """The int64 with the same 64 bits as the unsigned `value`."""
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN_GAMMA = _as_int64(0x9E3779B97F4A7C15)
_FIRST_FACTOR = _as_int64(0xBF58476D1CE4E5B9)
_SECOND_FACTOR = _as_int64(0x94D049BB133111EB)


def _shift_right(bits: Tensor, distance: int) -> Tensor:
    return (bits >> distance) & ((1 << (64 - distance)) - 1)


def _mix(bits: Tensor) -> Tensor:
    bits = (bits ^ _shift_right(bits, 30)) * _FIRST_FACTOR
    bits = (bits ^ _shift_right(bits, 27)) * _SECOND_FACTOR
    return bits ^ _shift_right(bits, 31)


def fold(keys: Tensor, data: int | Tensor) -> Tensor:
    """New keys from `keys` and `data`, both int64 (an int, or a tensor that broadcasts): one key for each pair.

    `fold(fold(seed, step), lane)` differs from `fold(fold(seed, lane), step)`, and neither is the sum of its parts.
    """
    assert keys.dtype == torch.int64, f"keys must be int64, not {keys.dtype}"
    data = torch.as_tensor(data, dtype=torch.int64, device=keys.device)
    return _mix(keys ^ _mix(data * _GOLDEN_GAMMA + _FIRST_FACTOR))


def uniform(keys: Tensor, num: int) -> Tensor:
    """Numbers in [0, 1), fp32, shape [*keys.shape, num]; element (..., i) depends on that key and on i only."""
    assert keys.dtype == torch.int64, f"keys must be int64, not {keys.dtype}"
    counter = torch.arange(1, num + 1, dtype=torch.int64, device=keys.device)
    bits = _mix(keys.unsqueeze(-1) + counter * _GOLDEN_GAMMA)
    # fp32 holds 24 bits: the top 24 give every multiple of 2^-24 below 1 the same chance, and never 1 itself.
    return _shift_right(bits, 40).to(torch.float32) * 2.0**-24
