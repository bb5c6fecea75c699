"""What the Triton kernels of the recurrent cells share: squashing, the hidden state's norm and skip, places in memory.

One kernel serves all recurrences. With a diagonal recurrence it runs over the whole window, its state in registers;
else it is launched for one position at a time, between two matrix products. Equations, formats and resets are those of
`reference.py`.

A program works on one row: on all its units where there is a layer norm, else on BLOCK of them. Units beyond the width
are masked out. Offsets that grow with time are 64 bits wide. An option is off where its tensor is None.

What a position read is kept for backward; what it computed from that and the gates is computed again there.

Legend: B rows, T time, D width, H heads (1 unless the recurrence is block), K units that a unit hears from (D where the
recurrence is diagonal), X gates, C = X * K all gates of one head side by side, G = H * C all gates, head by head.
"""

import triton
import triton.language as tl

from reprise.kernels.reference import NORM_EPSILON

EPSILON = tl.constexpr(NORM_EPSILON)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    """From exp(-2 |x|), which cannot overflow, and near zero from the series, where that form would lose digits."""
    shrunk = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - shrunk) / (1.0 + shrunk)
    result = tl.where(x < 0.0, -size, size)
    if x.dtype == tl.float32:
        square = x * x
        tail = -0.3333333333333333 + square * (
            0.13333333333333333 + square * (-0.05396825396825397 + square * 0.021869488536155203)
        )
        result = tl.where(tl.abs(x) < 0.25, x + x * square * tail, result)
    return result


@triton.jit
def load(pointer, offset, inside, KEPT: tl.constexpr):
    """Values in the kept format, zero outside; zero where there is no such tensor."""
    if pointer is None:
        return 0.0
    else:
        return tl.load(pointer + offset, mask=inside, other=0.0).to(KEPT)


@triton.jit
def state_share(weight, hidden, share_HBC, at, inside, KEPT: tl.constexpr):
    """The hidden state's share of a gate: elementwise, or from the matrix product."""
    if share_HBC is None:
        return weight * hidden
    else:
        return tl.load(share_HBC + at, mask=inside, other=0.0).to(KEPT)


@triton.jit
def finish(update, previous, skip, scale, shift, skip_scale_D, norm_scale_D, statistics_TB2, position, inside, WIDTH):
    """The hidden state from a cell's update: skip, then norm, whose mean and inverse deviation are kept."""
    if skip_scale_D is not None:
        update += skip * previous
    if norm_scale_D is None:
        return update
    else:
        mean = tl.sum(update, axis=0) / WIDTH
        centred = tl.where(inside, update - mean, 0.0)
        inverse_deviation = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=0) / WIDTH + EPSILON)
        if statistics_TB2 is not None:
            tl.store(statistics_TB2 + position * 2, mean)
            tl.store(statistics_TB2 + position * 2 + 1, inverse_deviation)
        return centred * inverse_deviation * scale + shift


@triton.jit
def normalised(update, statistics_TB2, position, inside, KEPT: tl.constexpr):
    """The update less its mean over its deviation, and one over its deviation."""
    mean = tl.load(statistics_TB2 + position * 2).to(KEPT)
    inverse_deviation = tl.load(statistics_TB2 + position * 2 + 1).to(KEPT)
    return tl.where(inside, (update - mean) * inverse_deviation, 0.0), inverse_deviation


@triton.jit
def norm_backward(grad, normal, inverse_deviation, scale, WIDTH):
    """The gradient of a norm's input from that of its output."""
    scaled = grad * scale
    along = tl.sum(scaled * normal, axis=0) / WIDTH
    return (scaled - tl.sum(scaled, axis=0) / WIDTH - normal * along) * inverse_deviation


@triton.jit
def places(num_rows, WIDTH: tl.constexpr, HEARD: tl.constexpr, BLOCK: tl.constexpr, NUM_GATES: tl.constexpr):
    """This program's row and units, and where they lie: in [B, D], in G, in [H, B, C] and in [H, B, K]."""
    row = tl.program_id(0).to(tl.int64)
    unit = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    head = unit // HEARD
    column = head * (NUM_GATES * HEARD) + unit % HEARD
    share_at = (head * num_rows + row) * HEARD
    return row, unit, column, share_at * NUM_GATES + unit % HEARD, share_at + unit % HEARD
