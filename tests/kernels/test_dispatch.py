"""Picking an implementation: said once, refused by name."""

import pytest
import torch

from reprise.kernels import cpu, dispatch, eager, library, native, reference
from reprise.runtime import UserError


def test_auto_is_what_runs_fastest_here(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch.pick.cache_clear()
    monkeypatch.setattr(native, "library", object)
    assert dispatch.pick("lstm", "cpu", torch.float32, "auto") is cpu.lstm
    assert dispatch.pick("lstm", "cpu", torch.bfloat16, "auto") is cpu.lstm
    assert dispatch.pick("lstm", "cpu", torch.float32, "auto", switches=("layer_norm",)) is cpu.lstm
    assert dispatch.pick("gru", "cpu", torch.float32, "auto") is cpu.gru
    assert dispatch.pick("gru", "cpu", torch.float64, "auto", switches=("layer_norm",)) is eager.gru
    assert dispatch.pick("gru", "cpu", torch.float32, "reference") is reference.gru


def test_auto_without_native_code_is_the_library_and_else_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch.pick.cache_clear()
    monkeypatch.setattr(native, "library", lambda: None)
    assert dispatch.pick("gru", "cpu", torch.float32, "auto") is library.gru
    assert dispatch.pick("gru", "cpu", torch.float32, "auto", switches=("layer_norm",)) is eager.gru
    with pytest.raises(UserError, match="implementation=native: no native library here; allowed: auto, library"):
        dispatch.pick("gru", "cpu", torch.float32, "native")
    dispatch.pick.cache_clear()


@pytest.mark.parametrize("recurrence", ["block", "diagonal"])
@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_a_recurrence_that_is_not_full_is_never_the_library_s(name: str, recurrence: str) -> None:
    picked = dispatch.pick(name, "cpu", torch.float32, "auto", switches=(recurrence,))
    assert picked is not dispatch.KERNELS[name]["library"]
    with pytest.raises(UserError, match=f"implementation=library: the library's {name} has no {recurrence}"):
        dispatch.pick(name, "cpu", torch.float32, "library", switches=(recurrence,))


def test_says_once_what_it_picked(capsys: pytest.CaptureFixture[str]) -> None:
    dispatch.pick.cache_clear()
    for _ in range(3):
        dispatch.pick("lstm", "cpu", torch.float64, "auto", switches=("coupled_gates",))
    assert capsys.readouterr().out == "kernel lstm with coupled_gates: eager (auto) on cpu, products in float64\n"


@pytest.mark.parametrize(
    ("name", "dtype", "implementation", "switches", "words"),
    [
        ("rnn", torch.float32, "auto", (), ("rnn", "lstm, gru")),
        ("lstm", torch.float32, "fast", (), ("implementation=fast", ", ".join(dispatch.IMPLEMENTATIONS))),
        ("gru", torch.float64, "library", ("layer_norm",), ("library", "layer_norm", "auto, eager, reference")),
        ("linear_cross_entropy", torch.float64, "library", (), ("linear_cross_entropy", "auto, eager, reference")),
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
