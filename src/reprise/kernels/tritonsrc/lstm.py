"""The LSTM as Triton kernels, forward and backward; how they are launched is in `elementwise.py`.

Legend: B rows, T time, D width, H heads, K units that a unit hears from, X gates (o, f, i, z, or o, f, z where the
input gate is 1 - f), C = X * K all gates of one head side by side, G = H * C all gates, head by head.
"""

import triton
import triton.language as tl

from reprise.kernels.tritonsrc.elementwise import (
    cleared,
    finish,
    finish_backward,
    load,
    load_gates,
    load_sums,
    places,
    sigmoid,
    skip_backward,
    state_shares,
    state_shares_backward,
    store,
    store_gates,
    store_sums,
    tanh,
)


@triton.jit
def side_by_side(o, f, i, z, NUM_GATES: tl.constexpr):
    """The gates that the weights have, in their order."""
    if NUM_GATES == 4:
        return o, f, i, z
    else:
        return o, f, z


@triton.jit
def activated(drives, biases, shares, NUM_GATES: tl.constexpr):
    """o, f, i, z from the parts of their sums."""
    o = sigmoid(drives[0] + biases[0] + shares[0])
    f = sigmoid(drives[1] + biases[1] + shares[1])
    z = tanh(drives[NUM_GATES - 1] + biases[NUM_GATES - 1] + shares[NUM_GATES - 1])
    if NUM_GATES == 4:
        return o, f, sigmoid(drives[2] + biases[2] + shares[2]), z
    else:
        return o, f, 1.0 - f, z


@triton.jit
def apart(gates, NUM_GATES: tl.constexpr):
    """o, f, i, z, where i is 1 - f if the weights have none."""
    if NUM_GATES == 4:
        return gates
    else:
        return gates[0], gates[1], 1.0 - gates[1], gates[2]


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
    weights = load_gates(recurrent_G, column, inside, HEARD, NUM_GATES, KEPT)
    biases = load_gates(bias_G, column, inside, HEARD, NUM_GATES, KEPT)
    scale, shift = load(norm_scale_D, unit, inside, KEPT), load(norm_shift_D, unit, inside, KEPT)
    skip = load(skip_scale_D, unit, inside, KEPT)
    hidden, cell = load(hidden_BD, here, inside, KEPT), load(memory_BD, here, inside, KEPT)
    position = row + tl.cast(start, tl.int64) * num_rows
    for _ in tl.range(num_steps, num_stages=STAGES):
        at, there = position * (WIDTH * NUM_GATES) + column, position * WIDTH + unit
        drives = load_gates(drive_TBG, at, inside, HEARD, NUM_GATES, KEPT)
        shares = state_shares(weights, hidden, share_HBC, share_at, inside, HEARD, NUM_GATES, KEPT)
        o, f, i, z = activated(drives, biases, shares, NUM_GATES)
        store_gates(gates_TBG, at, side_by_side(o, f, i, z, NUM_GATES), inside, HEARD)
        store(reads_TBD, there, hidden, inside)
        store(memories_TBD, there, cell, inside)
        cell = f * cell + i * z
        update = o * tanh(cell)
        hidden = finish(
            update, hidden, skip, scale, shift, skip_scale_D, norm_scale_D, statistics_TB2, position, inside, WIDTH
        )
        store(outputs_TBD, there, hidden, inside)
        hidden, cell = cleared(hidden, clear_TB, position), cleared(cell, clear_TB, position)
        position += num_rows
    store(hidden_BD, here, hidden, inside)
    store(reading_BD, here, hidden, inside)
    store(memory_BD, here, cell, inside)


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
    weights = load_gates(recurrent_G, column, inside, HEARD, NUM_GATES, KEPT)
    sums_recurrent = load_gates(sum_recurrent_BG, here_G, inside, HEARD, NUM_GATES, KEPT)
    scale, skip = load(norm_scale_D, unit, inside, KEPT), load(skip_scale_D, unit, inside, KEPT)
    sums = load_sums(sum_scale_BD, sum_shift_BD, sum_skip_BD, here, inside, KEPT)
    grad_hidden = load(grad_hidden_BD, here, inside, KEPT) + load(share_HBK, share_at, inside, KEPT)
    grad_cell = load(grad_memory_BD, here, inside, KEPT)
    position = row + tl.cast(start, tl.int64) * num_rows
    for _ in tl.range(num_steps, num_stages=STAGES):
        grad_hidden, grad_cell = cleared(grad_hidden, clear_TB, position), cleared(grad_cell, clear_TB, position)
        at, there = position * (WIDTH * NUM_GATES) + column, position * WIDTH + unit
        o, f, i, z = apart(load_gates(gates_TBG, at, inside, HEARD, NUM_GATES, KEPT), NUM_GATES)
        read, cell = load(reads_TBD, there, inside, KEPT), load(memories_TBD, there, inside, KEPT)
        squashed = tanh(f * cell + i * z)
        update = o * squashed
        grad = grad_hidden + load(grad_outputs_TBD, there, inside, KEPT)
        grad, sums = finish_backward(
            grad, update, read, skip, scale, sums, skip_scale_D, statistics_TB2, position, inside, WIDTH
        )
        grad_cell += grad * o * (1.0 - squashed * squashed)
        grad_o = grad * squashed * o * (1.0 - o)
        grad_z = grad_cell * i * (1.0 - z * z)
        grad_f = grad_cell * cell * f * (1.0 - f)
        grad_i = grad_cell * z * i * (1.0 - i)
        if NUM_GATES == 3:
            grad_f -= grad_i
        grad_cell *= f
        grad_gates = side_by_side(grad_o, grad_f, grad_i, grad_z, NUM_GATES)
        store_gates(grad_gates_TBG, at, grad_gates, inside, HEARD)
        grad_hidden = skip_backward(tl.zeros_like(grad), grad, skip, skip_scale_D)
        grad_hidden, sums_recurrent = state_shares_backward(
            grad_hidden, sums_recurrent, weights, grad_gates, read, recurrent_G, NUM_GATES
        )
        position -= num_rows
    store(grad_hidden_BD, here, grad_hidden, inside)
    store(grad_memory_BD, here, grad_cell, inside)
    store_sums(sum_scale_BD, sum_shift_BD, sum_skip_BD, here, sums, inside)
    store_gates(sum_recurrent_BG, here_G, sums_recurrent, inside, HEARD)
