"""The LSTM as Triton kernels, forward and backward; how they are launched is in `elementwise.py`.

Legend: B rows, T time, D width, H heads, K units that a unit hears from, X gates (o, f, i, z, or o, f, z where the
input gate is 1 - f), C = X * K all gates of one head side by side, G = H * C all gates, head by head.
"""

import triton
import triton.language as tl

from reprise.kernels.tritonsrc.elementwise import (
    finish,
    load,
    norm_backward,
    normalised,
    places,
    sigmoid,
    state_share,
    tanh,
)


@triton.jit(do_not_specialize=["start"])
def lstm_forward(
    drive_TBG,
    clear_TB,
    bias_G,
    recurrent_G,
    norm_scale_D,
    norm_shift_D,
    skip_scale_D,
    share_HBC,
    hidden_BD,
    reading_BD,
    memory_BD,
    outputs_TBD,
    gates_TBG,
    reads_TBD,
    memories_TBD,
    statistics_TB2,
    start,
    num_steps,
    num_rows,
    WIDTH: tl.constexpr,
    HEARD: tl.constexpr,
    NUM_GATES: tl.constexpr,
    BLOCK: tl.constexpr,
    KEPT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Positions start to start + num_steps: o, f, [i,] z from the sums, then cell, update and hidden state.

    hidden, reading (the same as the products read it) and memory (the cell) are updated in place, and come out as the
    next position reads them: zero where `clear` is set. gates, reads and memories are None where no backward follows.
    """
    row, unit, column, share_at, _ = places(num_rows, WIDTH, HEARD, BLOCK, NUM_GATES)
    inside, here = unit < WIDTH, row * WIDTH + unit
    last: tl.constexpr = (NUM_GATES - 1) * HEARD
    bias_o, weight_o = load(bias_G, column, inside, KEPT), load(recurrent_G, column, inside, KEPT)
    bias_f, weight_f = load(bias_G, column + HEARD, inside, KEPT), load(recurrent_G, column + HEARD, inside, KEPT)
    bias_i, weight_i = (
        load(bias_G, column + 2 * HEARD, inside, KEPT),
        load(recurrent_G, column + 2 * HEARD, inside, KEPT),
    )
    bias_z, weight_z = load(bias_G, column + last, inside, KEPT), load(recurrent_G, column + last, inside, KEPT)
    scale, shift = load(norm_scale_D, unit, inside, KEPT), load(norm_shift_D, unit, inside, KEPT)
    skip = load(skip_scale_D, unit, inside, KEPT)
    hidden, cell = load(hidden_BD, here, inside, KEPT), load(memory_BD, here, inside, KEPT)
    position = row + tl.cast(start, tl.int64) * num_rows
    for _ in tl.range(num_steps, num_stages=STAGES):
        at = position * (WIDTH * NUM_GATES) + column
        o = load(drive_TBG, at, inside, KEPT) + bias_o
        f = load(drive_TBG, at + HEARD, inside, KEPT) + bias_f
        z = load(drive_TBG, at + last, inside, KEPT) + bias_z
        o = sigmoid(o + state_share(weight_o, hidden, share_HBC, share_at, inside, KEPT))
        f = sigmoid(f + state_share(weight_f, hidden, share_HBC, share_at + HEARD, inside, KEPT))
        z = tanh(z + state_share(weight_z, hidden, share_HBC, share_at + last, inside, KEPT))
        i = 1.0 - f
        if NUM_GATES == 4:
            i = load(drive_TBG, at + 2 * HEARD, inside, KEPT) + bias_i
            i = sigmoid(i + state_share(weight_i, hidden, share_HBC, share_at + 2 * HEARD, inside, KEPT))
        there = position * WIDTH + unit
        if gates_TBG is not None:
            tl.store(gates_TBG + at, o, mask=inside)
            tl.store(gates_TBG + at + HEARD, f, mask=inside)
            if NUM_GATES == 4:
                tl.store(gates_TBG + at + 2 * HEARD, i, mask=inside)
            tl.store(gates_TBG + at + last, z, mask=inside)
            tl.store(reads_TBD + there, hidden, mask=inside)
            tl.store(memories_TBD + there, cell, mask=inside)
        cell = f * cell + i * z
        update = o * tanh(cell)
        hidden = finish(
            update, hidden, skip, scale, shift, skip_scale_D, norm_scale_D, statistics_TB2, position, inside, WIDTH
        )
        tl.store(outputs_TBD + there, hidden, mask=inside)
        if clear_TB is not None:
            is_cleared = tl.load(clear_TB + position) != 0
            hidden, cell = tl.where(is_cleared, 0.0, hidden), tl.where(is_cleared, 0.0, cell)
        position += num_rows
    tl.store(hidden_BD + here, hidden, mask=inside)
    tl.store(reading_BD + here, hidden, mask=inside)
    tl.store(memory_BD + here, cell, mask=inside)


@triton.jit(do_not_specialize=["start"])
def lstm_backward(
    grad_outputs_TBD,
    gates_TBG,
    reads_TBD,
    memories_TBD,
    statistics_TB2,
    clear_TB,
    recurrent_G,
    norm_scale_D,
    skip_scale_D,
    share_HBK,
    grad_hidden_BD,
    grad_memory_BD,
    sum_scale_BD,
    sum_shift_BD,
    sum_skip_BD,
    sum_recurrent_BG,
    grad_gates_TBG,
    start,
    num_steps,
    num_rows,
    WIDTH: tl.constexpr,
    HEARD: tl.constexpr,
    NUM_GATES: tl.constexpr,
    BLOCK: tl.constexpr,
    KEPT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Positions start down to start - num_steps + 1: gradients of the gates' sums, and sums over time of the rest.

    The gradient of the hidden state is `grad_hidden` plus `share`, what the matrix product passed back from the
    position after; `grad_hidden` comes out without the share of the last position done.
    """
    row, unit, column, _, share_at = places(num_rows, WIDTH, HEARD, BLOCK, NUM_GATES)
    inside, here, here_G = unit < WIDTH, row * WIDTH + unit, row * (WIDTH * NUM_GATES) + column
    last: tl.constexpr = (NUM_GATES - 1) * HEARD
    weight_o, weight_f = load(recurrent_G, column, inside, KEPT), load(recurrent_G, column + HEARD, inside, KEPT)
    weight_i, weight_z = (
        load(recurrent_G, column + 2 * HEARD, inside, KEPT),
        load(recurrent_G, column + last, inside, KEPT),
    )
    sum_o, sum_f = load(sum_recurrent_BG, here_G, inside, KEPT), load(sum_recurrent_BG, here_G + HEARD, inside, KEPT)
    sum_i, sum_z = (
        load(sum_recurrent_BG, here_G + 2 * HEARD, inside, KEPT),
        load(sum_recurrent_BG, here_G + last, inside, KEPT),
    )
    scale, skip = load(norm_scale_D, unit, inside, KEPT), load(skip_scale_D, unit, inside, KEPT)
    sum_scale, sum_shift = load(sum_scale_BD, here, inside, KEPT), load(sum_shift_BD, here, inside, KEPT)
    sum_skip = load(sum_skip_BD, here, inside, KEPT)
    grad_hidden = load(grad_hidden_BD, here, inside, KEPT) + load(share_HBK, share_at, inside, KEPT)
    grad_cell = load(grad_memory_BD, here, inside, KEPT)
    position = row + tl.cast(start, tl.int64) * num_rows
    for _ in tl.range(num_steps, num_stages=STAGES):
        if clear_TB is not None:
            is_cleared = tl.load(clear_TB + position) != 0
            grad_hidden, grad_cell = tl.where(is_cleared, 0.0, grad_hidden), tl.where(is_cleared, 0.0, grad_cell)
        at, there = position * (WIDTH * NUM_GATES) + column, position * WIDTH + unit
        o, f = load(gates_TBG, at, inside, KEPT), load(gates_TBG, at + HEARD, inside, KEPT)
        z = load(gates_TBG, at + last, inside, KEPT)
        i = 1.0 - f
        if NUM_GATES == 4:
            i = load(gates_TBG, at + 2 * HEARD, inside, KEPT)
        read, cell = load(reads_TBD, there, inside, KEPT), load(memories_TBD, there, inside, KEPT)
        squashed = tanh(f * cell + i * z)
        grad = grad_hidden + load(grad_outputs_TBD, there, inside, KEPT)
        if norm_scale_D is not None:
            update = o * squashed
            if skip_scale_D is not None:
                update += skip * read
            normal, inverse_deviation = normalised(update, statistics_TB2, position, inside, KEPT)
            sum_scale += grad * normal
            sum_shift += grad
            grad = norm_backward(grad, normal, inverse_deviation, scale, WIDTH)
        grad_cell += grad * o * (1.0 - squashed * squashed)
        grad_o = grad * squashed * o * (1.0 - o)
        grad_z = grad_cell * i * (1.0 - z * z)
        grad_f = grad_cell * cell * f * (1.0 - f)
        grad_i = grad_cell * z * i * (1.0 - i)
        if NUM_GATES == 3:
            grad_f -= grad_i
        tl.store(grad_gates_TBG + at, grad_o, mask=inside)
        tl.store(grad_gates_TBG + at + HEARD, grad_f, mask=inside)
        if NUM_GATES == 4:
            tl.store(grad_gates_TBG + at + 2 * HEARD, grad_i, mask=inside)
        tl.store(grad_gates_TBG + at + last, grad_z, mask=inside)
        grad_cell *= f
        grad_hidden = tl.zeros_like(grad)
        if skip_scale_D is not None:
            grad_hidden += skip * grad
            sum_skip += grad * read
        if recurrent_G is not None:
            grad_hidden += weight_o * grad_o + weight_f * grad_f + weight_z * grad_z
            sum_o += grad_o * read
            sum_f += grad_f * read
            sum_z += grad_z * read
            if NUM_GATES == 4:
                grad_hidden += weight_i * grad_i
                sum_i += grad_i * read
        position -= num_rows
    tl.store(grad_hidden_BD + here, grad_hidden, mask=inside)
    tl.store(grad_memory_BD + here, grad_cell, mask=inside)
    if norm_scale_D is not None:
        tl.store(sum_scale_BD + here, sum_scale, mask=inside)
        tl.store(sum_shift_BD + here, sum_shift, mask=inside)
    if skip_scale_D is not None:
        tl.store(sum_skip_BD + here, sum_skip, mask=inside)
    if recurrent_G is not None:
        tl.store(sum_recurrent_BG + here_G, sum_o, mask=inside)
        tl.store(sum_recurrent_BG + here_G + HEARD, sum_f, mask=inside)
        if NUM_GATES == 4:
            tl.store(sum_recurrent_BG + here_G + 2 * HEARD, sum_i, mask=inside)
        tl.store(sum_recurrent_BG + here_G + last, sum_z, mask=inside)
