"""Picking an implementation: said once, refused by name."""

import pytest
import torch

from reprise.kernels import dispatch, eager, library, reference
from reprise.runtime import UserError


def test_auto_is_the_library_where_no_switch_is_on() -> None:
    assert dispatch.pick("lstm", "cpu", torch.float32, "auto") is library.lstm
    assert dispatch.pick("lstm", "cpu", torch.float32, "auto", switches=("layer_norm",)) is eager.lstm
    assert dispatch.pick("gru", "cpu", torch.float32, "reference") is reference.gru


def test_says_once_what_it_picked(capsys: pytest.CaptureFixture[str]) -> None:
    dispatch.pick.cache_clear()
    for _ in range(3):
        dispatch.pick("lstm", "cpu", torch.bfloat16, "auto", switches=("coupled_gates",))
    assert capsys.readouterr().out == "kernel lstm with coupled_gates: eager (auto) on cpu, products in bfloat16\n"


@pytest.mark.parametrize(
    ("name", "dtype", "implementation", "switches", "words"),
    [
        ("rnn", torch.float32, "auto", (), ("rnn", "lstm, gru")),
        ("lstm", torch.float32, "fast", (), ("implementation=fast", "auto, library, eager, reference")),
        ("gru", torch.float32, "library", ("layer_norm",), ("library", "layer_norm", "auto, eager, reference")),
        ("linear_cross_entropy", torch.float32, "library", (), ("linear_cross_entropy", "auto, eager, reference")),
    ],
)
def test_refuses_by_name(
    name: str, dtype: torch.dtype, implementation: str, switches: tuple[str, ...], words: tuple[str, ...]
) -> None:
    with pytest.raises(UserError) as refusal:
        dispatch.pick(name, "cpu", dtype, implementation, switches=switches)
    assert all(word in str(refusal.value) for word in words)


def test_refuses_weights_that_are_no_floats() -> None:
    weights = reference.LstmWeights(*(torch.zeros(4, 1, dtype=torch.int64) for _ in range(3)))
    state = (torch.zeros(1, 1), torch.zeros(1, 1))
    with pytest.raises(UserError, match="int64; allowed: float32"):
        eager.lstm(torch.zeros(1, 1, 1), state, None, weights, coupled_gates=False)
