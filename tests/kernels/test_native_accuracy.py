"""The native kernels over a thousand random windows and at the sizes of training; minutes, so slow.

Legend: B rows, T time, D width, G all gates side by side, N tokens.
"""

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import ACCURACY, ALL_CASES, CellCase, make_inputs, outcome, relative_rms
from native_cases import (
    DTYPES,
    NORMED_GRU,
    NUM_ROWS,
    NUM_STEPS,
    OPTIMIZED,
    REAL_CASES,
    SCANNED,
    WIDTH,
    as_float32,
    as_float64,
    changed,
    gated_window,
    loss_inputs,
    loss_outcome,
    random_resets,
    scanned_window,
    too_far,
)
from torch import Tensor

from reprise.kernels import cpu, cpu_loss, native, reference

pytestmark = [pytest.mark.slow, pytest.mark.skipif(native.library() is None, reason="no C++ compiler here")]

# What this processor can run, and AMX's memory layout in plain code.
LEVELS = (*native._levels_here(), "emulated_tiles")
_load = cache(native.load)


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@settings(max_examples=1000, deadline=None, derandomize=True)
@given(
    case=st.sampled_from(ALL_CASES),
    dtype=st.sampled_from(DTYPES),
    level=st.sampled_from(LEVELS),
    # Rows, steps, width, input width. A norm over a few units is near a sign, whose slope no format tells right.
    shape=st.tuples(st.integers(1, 70), st.integers(1, 24), st.integers(16, 96), st.integers(8, 40)),
    reset_share=st.sampled_from((0.0, 0.05, 1.0)),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_thousand_random_windows_equal_float64(
    case: CellCase, dtype: torch.dtype, level: str, shape: tuple[int, int, int, int], reset_share: float, seed: int
) -> None:
    num_rows, num_steps, width, width_in = shape
    width -= width % 2 if case.recurrence == "block" else 0
    inputs = make_inputs(case, dtype, num_rows=num_rows, num_steps=num_steps, width=width, width_in=width_in, seed=seed)
    skip_D = inputs[2].skip_scale_D
    if case.kind == "gru" and not case.layer_norm and skip_D is not None:
        # Where z + s is above one, a GRU without a norm feeds itself up, and what was rounded with it.
        skip_D.detach().neg_()
    reset_BT = random_resets(num_rows, num_steps, share=reset_share, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "library", lambda: _load(level))
        value = outcome(cpu, case, inputs, reset_BT)
    expected = outcome(reference, case, changed(inputs, as_float64), reset_BT)
    share_of_bound = 1.0
    if too_far(value, expected, dtype):
        # Where the definition itself, run in this format, uses up half the bound, the format cannot tell the numbers.
        is_hard = too_far(outcome(reference, case, inputs, reset_BT), expected, dtype, share_of_bound=0.5)
        share_of_bound = 2.0 if is_hard else 1.0
    assert not too_far(value, expected, dtype, share_of_bound=share_of_bound)


@settings(max_examples=1000, deadline=None, derandomize=True)
@given(
    dtype=st.sampled_from(DTYPES),
    level=st.sampled_from(LEVELS),
    # Tokens, words, width.
    shape=st.tuples(st.integers(1, 150), st.integers(16, 600), st.integers(8, 64)),
    chunk_tokens=st.one_of(st.none(), st.integers(1, 150)),
    label_smoothing=st.sampled_from((0.0, 0.1)),
    z_loss=st.sampled_from((0.0, 1e-2)),
    ignored_share=st.sampled_from((0.0, 0.3)),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_thousand_random_losses_equal_float64(
    dtype: torch.dtype,
    level: str,
    shape: tuple[int, int, int],
    chunk_tokens: int | None,
    label_smoothing: float,
    z_loss: float,
    ignored_share: float,
    seed: int,
) -> None:
    leaves, targets_N = loss_inputs(*shape, dtype=dtype, seed=seed)
    is_ignored_N = random_resets(shape[0], 1, share=ignored_share, seed=seed)[:, 0]
    targets_N[is_ignored_N] = reference.IGNORE
    options: dict[str, Any] = {"chunk_tokens": chunk_tokens, "label_smoothing": label_smoothing, "z_loss": z_loss}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "library", lambda: _load(level))
        value = loss_outcome(cpu_loss.linear_cross_entropy, leaves, targets_N, **options)
    expected = loss_outcome(reference.linear_cross_entropy, [*map(as_float64, leaves)], targets_N, **options)
    # One score in bf16 may be a thousandth off by itself: many tokens are within it together.
    bound = min(1e-3, ACCURACY[dtype]) if shape[0] >= 16 else ACCURACY[dtype]
    assert relative_rms(value["loss"], expected["loss"]) <= bound
    assert not too_far(value, expected, dtype)


@pytest.mark.parametrize(
    ("case", "num_rows", "num_steps", "width"),
    [
        *((case, NUM_ROWS, NUM_STEPS, WIDTH) for case in (*REAL_CASES, CellCase("lstm"), CellCase("gru"))),
        *(
            (case, *shape)
            for case in (OPTIMIZED, NORMED_GRU)
            for shape in ((NUM_ROWS, 1, WIDTH), (NUM_ROWS, 33, 500), (1, NUM_STEPS, WIDTH), (128, 32, WIDTH))
        ),
    ],
    ids=str,
)
def test_real_sizes_equal_float64(case: CellCase, num_rows: int, num_steps: int, width: int) -> None:
    low = make_inputs(case, torch.bfloat16, num_rows=num_rows, num_steps=num_steps, width=width, width_in=width)
    reset_BT = random_resets(num_rows, num_steps, share=1 / 64)
    # Numbers that bf16 can hold are the same in all three formats: one run of the reference is enough.
    expected = outcome(reference, case, changed(low, as_float64), reset_BT)
    for dtype in DTYPES:
        value = outcome(cpu, case, low if dtype == torch.bfloat16 else changed(low, as_float32), reset_BT)
        assert not too_far(value, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cell", [*REAL_CASES, *SCANNED], ids=str)
def test_a_document_is_as_if_it_were_alone(cell: CellCase | str, dtype: torch.dtype) -> None:
    """Bit for bit, states and gradients, among 31 other rows and with the state carried over two windows."""
    if isinstance(cell, str):
        window, num_parts, num_gates = scanned_window(cell, dtype, WIDTH), 1, SCANNED[cell]
    else:
        window, num_parts = gated_window(cell, dtype, WIDTH), 1 if cell.kind == "gru" else 2
        num_gates = 3 if cell.kind == "gru" or cell.coupled_gates else 4
    generator = torch.Generator().manual_seed(2)
    x_BTG, weighting_BTD = (
        torch.randn(NUM_ROWS, NUM_STEPS, count * WIDTH, generator=generator).to(dtype) for count in (num_gates, 1)
    )
    x_BTG.requires_grad_()
    reset_BT, half = random_resets(NUM_ROWS, NUM_STEPS, share=1 / 48), NUM_STEPS // 2
    before = tuple(torch.randn(NUM_ROWS, WIDTH, generator=generator) for _ in range(num_parts))
    first_BTD, carried = window(x_BTG[:, :half], before, reset_BT[:, :half])
    second_BTD, last = window(x_BTG[:, half:], carried, reset_BT[:, half:])
    y_BTD = torch.cat((first_BTD, second_BTD), dim=1)
    gradient_BTG = torch.autograd.grad((y_BTD * weighting_BTD).sum(), x_BTG)[0]
    documents = _documents(reset_BT)[::4]
    assert any(first < half < stop for _, first, stop in documents), "no document goes on in the second window"
    for row, first, stop in documents:
        alone_BTG = x_BTG.detach()[row : row + 1, first:stop].clone().requires_grad_()
        nothing = tuple(torch.zeros(1, WIDTH) for _ in range(num_parts))
        alone_BTD, alone_last = window(alone_BTG, nothing, None)
        assert torch.equal(alone_BTD[0], y_BTD[row, first:stop])
        if stop == NUM_STEPS:
            assert all(torch.equal(alone[0], part[row]) for alone, part in zip(alone_last, last, strict=True))
        gradient = torch.autograd.grad((alone_BTD * weighting_BTD[row, first:stop]).sum(), alone_BTG)[0]
        if dtype == torch.bfloat16 and first < half < stop:
            # Backward reads a window's own cell states rounded to bf16, and the carried one as it came, in fp32.
            assert relative_rms(gradient[0], gradient_BTG[row, first:stop]) <= ACCURACY[dtype]
        else:
            assert torch.equal(gradient[0], gradient_BTG[row, first:stop])


def _documents(reset_BT: Tensor) -> list[tuple[int, int, int]]:
    """(row, first position, position after the last) of every document that begins in the window."""
    documents = []
    for row, is_first_T in enumerate(reset_BT):
        edges = [*is_first_T.nonzero().flatten().tolist(), len(is_first_T)]
        documents += [(row, first, stop) for first, stop in pairwise(edges)]
    return documents
