"""Memory that comes back for the next window, and never while anything still reads it."""

import gc

import pytest
import torch
from torch import Tensor

from reprise.kernels import native
from reprise.kernels.window_memory import WindowMemory

SHAPE = (3, 1 << 18)


@pytest.fixture
def memory() -> WindowMemory:
    return WindowMemory()


def test_memory_comes_back_once_nothing_reads_it(memory: WindowMemory) -> None:
    first = memory.empty(SHAPE, torch.float32).fill_(1.0)
    assert first.shape == SHAPE and first.is_contiguous()
    place = first.data_ptr()
    view = first[1].detach()
    del first
    gc.collect()
    second = memory.empty(SHAPE, torch.float32).fill_(2.0)
    assert second.data_ptr() != place, "a view still reads it"
    assert view.eq(1.0).all()
    del view
    gc.collect()
    assert memory.free_bytes() == second.nbytes
    # The same bytes in another format.
    third = memory.empty((2, *SHAPE), torch.bfloat16)
    assert third.data_ptr() == place and memory.free_bytes() == 0


def test_what_autograd_saved_is_still_read(memory: WindowMemory) -> None:
    weight = torch.ones(SHAPE, requires_grad=True)

    def forward(value: float) -> Tensor:
        return (weight * memory.empty(SHAPE, torch.float32).fill_(value)).sum()

    windows = [forward(1.0), forward(2.0)]
    gradients = [torch.autograd.grad(window, weight)[0] for window in windows]
    assert gradients[0].eq(1.0).all() and gradients[1].eq(2.0).all()


def test_memory_of_sizes_no_longer_asked_for_is_given_back(memory: WindowMemory) -> None:
    pair = [memory.empty(SHAPE, torch.float32), memory.empty((2, *SHAPE), torch.float32)]
    sizes = [part.nbytes for part in pair]
    pair.clear()
    gc.collect()
    assert memory.free_bytes() == sum(sizes)
    # Layers of two widths take turns, and neither drives the other out.
    again = memory.empty((2, *SHAPE), torch.float32)
    assert memory.free_bytes() == sizes[0]
    other = memory.empty((5, *SHAPE), torch.float32)
    assert memory.free_bytes() == 0
    assert again.nbytes == sizes[1] and other.shape == (5, *SHAPE)


def test_small_and_empty_tensors_are_the_allocators(memory: WindowMemory) -> None:
    for shape in ((0, 5), (7, 3)):
        assert memory.empty(shape, torch.float32).shape == shape
    gc.collect()
    assert memory.free_bytes() == 0


@pytest.mark.skipif(native.library() is None, reason="no compiler")
def test_two_windows_before_their_backward_keep_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from reprise.kernels import cpu, window_memory
    from reprise.kernels.reference import LstmWeights

    monkeypatch.setattr(window_memory, "_SMALLEST_BYTES", 1)
    torch.manual_seed(0)
    width = 24
    weights = LstmWeights(*(torch.randn(shape) for shape in ((3 * width, width), (3 * width, width), (3 * width,))))
    inputs = [torch.randn(2, 5, width, requires_grad=True) for _ in range(2)]

    def forward(x_BTE: Tensor) -> Tensor:
        state = (torch.zeros(2, width), torch.zeros(2, width))
        return cpu.lstm(x_BTE, state, None, weights, coupled_gates=True)[0].sum()

    alone = [torch.autograd.grad(forward(x_BTE), x_BTE)[0] for x_BTE in inputs]
    windows = [forward(x_BTE) for x_BTE in inputs]
    for window, x_BTE, expected in zip(windows, inputs, alone, strict=True):
        assert torch.equal(torch.autograd.grad(window, x_BTE)[0], expected)
