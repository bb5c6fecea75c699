"""Numbers from keys: the published generator, and independence of everything but the key."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from reprise.kernels.keyed_random import fold, uniform

_MASK = (1 << 64) - 1


def _splitmix64(seed: int, index: int) -> int:
    """The index-th output of the generator started at `seed`, in Python's unbounded integers."""
    bits = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _MASK
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _MASK
    return bits ^ (bits >> 31)


@given(st.integers(-(2**63), 2**63 - 1))
def test_uniform_is_splitmix64(key: int) -> None:
    values = uniform(torch.tensor(key), 3)
    assert values.tolist() == [(_splitmix64(key & _MASK, index) >> 40) / 2**24 for index in range(3)]


def test_known_answer() -> None:
    assert _splitmix64(1234567, 0) == 6457827717110365317


def test_uniform_fills_the_unit_interval() -> None:
    values = uniform(torch.arange(100), 1000)
    assert values.dtype == torch.float32
    assert 0.0 <= values.min().item() < 1e-3 and 0.999 < values.max().item() < 1.0
    assert abs(values.mean().item() - 0.5) < 0.005
    assert abs(torch.corrcoef(values[:2])[0, 1].item()) < 0.1


def test_a_row_does_not_depend_on_other_rows() -> None:
    keys = torch.tensor([5, -7, 2**62])
    assert torch.equal(uniform(keys, 10)[1], uniform(keys[1:2], 10)[0])
    assert torch.equal(uniform(keys, 10)[:, :4], uniform(keys, 4))


def test_fold_tells_order_and_data_apart() -> None:
    seed = torch.tensor([0, 1, 2, 3])
    folded = {fold(fold(seed, step), lane)[0].item() for step in range(30) for lane in range(30)}
    assert len(folded) == 900
    assert torch.equal(fold(seed, 7), fold(seed, torch.full_like(seed, 7)))
