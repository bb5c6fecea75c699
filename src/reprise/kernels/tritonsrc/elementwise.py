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
    """Of a large negative x too: exp overflows to infinity, and its inverse is zero."""
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
def load(pointer, at, inside, KEPT: tl.constexpr):
    """Values in the kept format, zero outside; zero where there is no such tensor."""
    if pointer is None:
        return tl.zeros(inside.shape, KEPT)
    else:
        return tl.load(pointer + at, mask=inside, other=0.0).to(KEPT)


@triton.jit
def store(pointer, at, values, inside):
    """Nothing where there is no such tensor."""
    if pointer is not None:
        tl.store(pointer + at, values, mask=inside)


@triton.jit
def load_gates(pointer, at, inside, HEARD: tl.constexpr, NUM_GATES: tl.constexpr, KEPT: tl.constexpr):
    """A tuple of all gates' values, the first of them at `at`."""
    first, second = load(pointer, at, inside, KEPT), load(pointer, at + HEARD, inside, KEPT)
    third = load(pointer, at + 2 * HEARD, inside, KEPT)
    if NUM_GATES == 3:
        return first, second, third
    else:
        return first, second, third, load(pointer, at + 3 * HEARD, inside, KEPT)


@triton.jit
def store_gates(pointer, at, gates, inside, HEARD: tl.constexpr):
    """The inverse of `load_gates`."""
    for index in tl.static_range(len(gates)):
        store(pointer, at + index * HEARD, gates[index], inside)


@triton.jit
def state_shares(
    weights, hidden, share_HBC, at, inside, HEARD: tl.constexpr, NUM_GATES: tl.constexpr, KEPT: tl.constexpr
):
    """The hidden state's share of all gates: elementwise, or from the matrix product."""
    if share_HBC is not None:
        return load_gates(share_HBC, at, inside, HEARD, NUM_GATES, KEPT)
    elif NUM_GATES == 3:
        return weights[0] * hidden, weights[1] * hidden, weights[2] * hidden
    else:
        return weights[0] * hidden, weights[1] * hidden, weights[2] * hidden, weights[3] * hidden


@triton.jit
def state_shares_backward(grad_hidden, sums, weights, grad_gates, read, recurrent_G, NUM_GATES: tl.constexpr):
    """Elementwise shares: adds to the hidden state's gradient, and to the weights' sums over time. Else as they were.

    What a matrix product passes back is another launch's.
    """
    if recurrent_G is None:
        return grad_hidden, sums
    else:
        last: tl.constexpr = NUM_GATES - 1
        grad_hidden += weights[0] * grad_gates[0] + weights[1] * grad_gates[1] + weights[last] * grad_gates[last]
        sum_0, sum_1 = sums[0] + grad_gates[0] * read, sums[1] + grad_gates[1] * read
        sum_last = sums[last] + grad_gates[last] * read
        if NUM_GATES == 3:
            return grad_hidden, (sum_0, sum_1, sum_last)
        else:
            grad_hidden += weights[2] * grad_gates[2]
            return grad_hidden, (sum_0, sum_1, sums[2] + grad_gates[2] * read, sum_last)


@triton.jit
def cleared(part, clear_TB, position):
    """Zero where the position after starts anew."""
    if clear_TB is None:
        return part
    else:
        return tl.where(tl.load(clear_TB + position) != 0, 0.0, part)


@triton.jit
def finish(
    update, read, skip, scale, shift, skip_scale_D, norm_scale_D, statistics_TB2, position, inside, WIDTH: tl.constexpr
):
    """The hidden state from a cell's update: skip, then norm, whose mean and inverse deviation are kept."""
    if skip_scale_D is not None:
        update += skip * read
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
def finish_backward(
    grad, update, read, skip, scale, sums, skip_scale_D, statistics_TB2, position, inside, WIDTH: tl.constexpr
):
    """The update's gradient from the hidden state's, and what is added up over time: for norm's scale, shift, skip.

    No statistics, no norm.
    """
    sum_scale, sum_shift, sum_skip = sums
    if statistics_TB2 is not None:
        if skip_scale_D is not None:
            update += skip * read
        mean = tl.load(statistics_TB2 + position * 2).to(grad.dtype)
        inverse_deviation = tl.load(statistics_TB2 + position * 2 + 1).to(grad.dtype)
        normal = tl.where(inside, (update - mean) * inverse_deviation, 0.0)
        sum_scale += grad * normal
        sum_shift += grad
        scaled = grad * scale
        along = tl.sum(scaled * normal, axis=0) / WIDTH
        grad = (scaled - tl.sum(scaled, axis=0) / WIDTH - normal * along) * inverse_deviation
    if skip_scale_D is not None:
        sum_skip += grad * read
    return grad, (sum_scale, sum_shift, sum_skip)


@triton.jit
def skip_backward(grad_hidden, grad, skip, skip_scale_D):
    """Adds what the skip passes back of the update's gradient `grad`."""
    if skip_scale_D is None:
        return grad_hidden
    else:
        return grad_hidden + skip * grad


@triton.jit
def load_sums(sum_scale_BD, sum_shift_BD, sum_skip_BD, here, inside, KEPT: tl.constexpr):
    """What `finish_backward` has added up so far."""
    sum_scale, sum_shift = load(sum_scale_BD, here, inside, KEPT), load(sum_shift_BD, here, inside, KEPT)
    return sum_scale, sum_shift, load(sum_skip_BD, here, inside, KEPT)


@triton.jit
def store_sums(sum_scale_BD, sum_shift_BD, sum_skip_BD, here, sums, inside):
    """The inverse of `load_sums`."""
    store(sum_scale_BD, here, sums[0], inside)
    store(sum_shift_BD, here, sums[1], inside)
    store(sum_skip_BD, here, sums[2], inside)


@triton.jit
def places(num_rows, WIDTH: tl.constexpr, HEARD: tl.constexpr, BLOCK: tl.constexpr, NUM_GATES: tl.constexpr):
    """This program's row and units, and where they lie: in [B, D], in G, in [H, B, C] and in [H, B, K]."""
    row = tl.program_id(0).to(tl.int64)
    unit = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    head = unit // HEARD
    column = head * (NUM_GATES * HEARD) + unit % HEARD
    share_at = (head * num_rows + row) * HEARD
    return row, unit, column, share_at * NUM_GATES + unit % HEARD, share_at + unit % HEARD
