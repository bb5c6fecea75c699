"""The GRU as Triton kernels, forward and backward; how they are launched is in `elementwise.py`.

Legend: B rows, T time, D width, H heads, K units that a unit hears from, X gates (r, z, n), C = X * K all gates of one
head side by side, G = H * C all gates, head by head.
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


@triton.jit(do_not_specialize=["start"])
def gru_forward(
    drive_TBG,
    clear_TB,
    bias_G,
    candidate_bias_D,
    recurrent_G,
    norm_scale_D,
    norm_shift_D,
    skip_scale_D,
    share_HBC,
    hidden_BD,
    reading_BD,
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
    """Positions start to start + num_steps: r, z, n from the sums, then update and hidden state.

    hidden and reading (the same as the products read it) are updated in place, and come out as the next position reads
    them: zero where `clear` is set. memories is what the reset gate multiplied. gates, reads and memories are None
    where no backward follows.
    """
    row, unit, column, share_at, _ = places(num_rows, WIDTH, HEARD, BLOCK, NUM_GATES)
    inside, here = unit < WIDTH, row * WIDTH + unit
    weights = load_gates(recurrent_G, column, inside, HEARD, NUM_GATES, KEPT)
    bias_r, bias_z, bias_n = load_gates(bias_G, column, inside, HEARD, NUM_GATES, KEPT)
    candidate_bias = load(candidate_bias_D, unit, inside, KEPT)
    scale, shift = load(norm_scale_D, unit, inside, KEPT), load(norm_shift_D, unit, inside, KEPT)
    skip = load(skip_scale_D, unit, inside, KEPT)
    hidden = load(hidden_BD, here, inside, KEPT)
    position = row + tl.cast(start, tl.int64) * num_rows
    for _ in tl.range(num_steps, num_stages=STAGES):
        at, there = position * (WIDTH * NUM_GATES) + column, position * WIDTH + unit
        drive_r, drive_z, drive_n = load_gates(drive_TBG, at, inside, HEARD, NUM_GATES, KEPT)
        shares = state_shares(weights, hidden, share_HBC, share_at, inside, HEARD, NUM_GATES, KEPT)
        share_r, share_z, share_n = shares
        recalled = share_n + candidate_bias
        r = sigmoid(drive_r + bias_r + share_r)
        z = sigmoid(drive_z + bias_z + share_z)
        n = tanh(drive_n + bias_n + r * recalled)
        store_gates(gates_TBG, at, (r, z, n), inside, HEARD)
        store(reads_TBD, there, hidden, inside)
        store(memories_TBD, there, recalled, inside)
        update = (1.0 - z) * n + z * hidden
        hidden = finish(
            update, hidden, skip, scale, shift, skip_scale_D, norm_scale_D, statistics_TB2, position, inside, WIDTH
        )
        store(outputs_TBD, there, hidden, inside)
        hidden = cleared(hidden, clear_TB, position)
        position += num_rows
    store(hidden_BD, here, hidden, inside)
    store(reading_BD, here, hidden, inside)


@triton.jit(do_not_specialize=["start"])
def gru_backward(
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
    sum_scale_BD,
    sum_shift_BD,
    sum_skip_BD,
    sum_recurrent_BG,
    sum_candidate_BD,
    grad_gates_TBG,
    grad_shares_TBG,
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

    `grad_shares` is the gradient of the matrix product, which differs from the drive's in the candidate: there the
    reset gate comes between. The gradient of the hidden state is `grad_hidden` plus `share`, as in `lstm_backward`.
    """
    row, unit, column, _, share_at = places(num_rows, WIDTH, HEARD, BLOCK, NUM_GATES)
    inside, here, here_G = unit < WIDTH, row * WIDTH + unit, row * (WIDTH * NUM_GATES) + column
    weights = load_gates(recurrent_G, column, inside, HEARD, NUM_GATES, KEPT)
    sums_recurrent = load_gates(sum_recurrent_BG, here_G, inside, HEARD, NUM_GATES, KEPT)
    scale, skip = load(norm_scale_D, unit, inside, KEPT), load(skip_scale_D, unit, inside, KEPT)
    sums = load_sums(sum_scale_BD, sum_shift_BD, sum_skip_BD, here, inside, KEPT)
    sum_candidate = load(sum_candidate_BD, here, inside, KEPT)
    grad_hidden = load(grad_hidden_BD, here, inside, KEPT) + load(share_HBK, share_at, inside, KEPT)
    position = row + tl.cast(start, tl.int64) * num_rows
    for _ in tl.range(num_steps, num_stages=STAGES):
        grad_hidden = cleared(grad_hidden, clear_TB, position)
        at, there = position * (WIDTH * NUM_GATES) + column, position * WIDTH + unit
        r, z, n = load_gates(gates_TBG, at, inside, HEARD, NUM_GATES, KEPT)
        read, recalled = load(reads_TBD, there, inside, KEPT), load(memories_TBD, there, inside, KEPT)
        update = (1.0 - z) * n + z * read
        grad = grad_hidden + load(grad_outputs_TBD, there, inside, KEPT)
        grad, sums = finish_backward(
            grad, update, read, skip, scale, sums, skip_scale_D, statistics_TB2, position, inside, WIDTH
        )
        grad_n = grad * (1.0 - z) * (1.0 - n * n)
        grad_r = grad_n * recalled * r * (1.0 - r)
        grad_z = grad * (read - n) * z * (1.0 - z)
        grad_recalled = grad_n * r
        sum_candidate += grad_recalled
        grad_shares = (grad_r, grad_z, grad_recalled)
        store_gates(grad_gates_TBG, at, (grad_r, grad_z, grad_n), inside, HEARD)
        store_gates(grad_shares_TBG, at, grad_shares, inside, HEARD)
        grad_hidden = skip_backward(grad * z, grad, skip, skip_scale_D)
        grad_hidden, sums_recurrent = state_shares_backward(
            grad_hidden, sums_recurrent, weights, grad_shares, read, recurrent_G, NUM_GATES
        )
        position -= num_rows
    store(grad_hidden_BD, here, grad_hidden, inside)
    store(sum_candidate_BD, here, sum_candidate, inside)
    store_sums(sum_scale_BD, sum_shift_BD, sum_skip_BD, here, sums, inside)
    store_gates(sum_recurrent_BG, here_G, sums_recurrent, inside, HEARD)
