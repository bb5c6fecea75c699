"""The GRU as Triton kernels, forward and backward; how they are launched is in `elementwise.py`.

Legend: B rows, T time, D width, H heads, K units that a unit hears from, X gates (r, z, n), C = X * K all gates of one
head side by side, G = H * C all gates, head by head.
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
    bias_r, weight_r = load(bias_G, column, inside, KEPT), load(recurrent_G, column, inside, KEPT)
    bias_z, weight_z = load(bias_G, column + HEARD, inside, KEPT), load(recurrent_G, column + HEARD, inside, KEPT)
    bias_n, weight_n = (
        load(bias_G, column + 2 * HEARD, inside, KEPT),
        load(recurrent_G, column + 2 * HEARD, inside, KEPT),
    )
    candidate_bias = load(candidate_bias_D, unit, inside, KEPT)
    scale, shift = load(norm_scale_D, unit, inside, KEPT), load(norm_shift_D, unit, inside, KEPT)
    skip = load(skip_scale_D, unit, inside, KEPT)
    hidden = load(hidden_BD, here, inside, KEPT)
    position = row + tl.cast(start, tl.int64) * num_rows
    for _ in tl.range(num_steps, num_stages=STAGES):
        at, there = position * (WIDTH * NUM_GATES) + column, position * WIDTH + unit
        r = state_share(weight_r, hidden, share_HBC, share_at, inside, KEPT)
        z = state_share(weight_z, hidden, share_HBC, share_at + HEARD, inside, KEPT)
        recalled = state_share(weight_n, hidden, share_HBC, share_at + 2 * HEARD, inside, KEPT) + candidate_bias
        r = sigmoid(load(drive_TBG, at, inside, KEPT) + bias_r + r)
        z = sigmoid(load(drive_TBG, at + HEARD, inside, KEPT) + bias_z + z)
        n = tanh(load(drive_TBG, at + 2 * HEARD, inside, KEPT) + bias_n + r * recalled)
        if gates_TBG is not None:
            tl.store(gates_TBG + at, r, mask=inside)
            tl.store(gates_TBG + at + HEARD, z, mask=inside)
            tl.store(gates_TBG + at + 2 * HEARD, n, mask=inside)
            tl.store(reads_TBD + there, hidden, mask=inside)
            tl.store(memories_TBD + there, recalled, mask=inside)
        update = (1.0 - z) * n + z * hidden
        hidden = finish(
            update, hidden, skip, scale, shift, skip_scale_D, norm_scale_D, statistics_TB2, position, inside, WIDTH
        )
        tl.store(outputs_TBD + there, hidden, mask=inside)
        if clear_TB is not None:
            hidden = tl.where(tl.load(clear_TB + position) != 0, 0.0, hidden)
        position += num_rows
    tl.store(hidden_BD + here, hidden, mask=inside)
    tl.store(reading_BD + here, hidden, mask=inside)


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
    weight_r, sum_r = load(recurrent_G, column, inside, KEPT), load(sum_recurrent_BG, here_G, inside, KEPT)
    weight_z, sum_z = (
        load(recurrent_G, column + HEARD, inside, KEPT),
        load(sum_recurrent_BG, here_G + HEARD, inside, KEPT),
    )
    weight_n = load(recurrent_G, column + 2 * HEARD, inside, KEPT)
    sum_n = load(sum_recurrent_BG, here_G + 2 * HEARD, inside, KEPT)
    scale, skip = load(norm_scale_D, unit, inside, KEPT), load(skip_scale_D, unit, inside, KEPT)
    sum_scale, sum_shift = load(sum_scale_BD, here, inside, KEPT), load(sum_shift_BD, here, inside, KEPT)
    sum_skip, sum_candidate = load(sum_skip_BD, here, inside, KEPT), load(sum_candidate_BD, here, inside, KEPT)
    grad_hidden = load(grad_hidden_BD, here, inside, KEPT) + load(share_HBK, share_at, inside, KEPT)
    position = row + tl.cast(start, tl.int64) * num_rows
    for _ in tl.range(num_steps, num_stages=STAGES):
        if clear_TB is not None:
            grad_hidden = tl.where(tl.load(clear_TB + position) != 0, 0.0, grad_hidden)
        at, there = position * (WIDTH * NUM_GATES) + column, position * WIDTH + unit
        r, z = load(gates_TBG, at, inside, KEPT), load(gates_TBG, at + HEARD, inside, KEPT)
        n, read = load(gates_TBG, at + 2 * HEARD, inside, KEPT), load(reads_TBD, there, inside, KEPT)
        grad = grad_hidden + load(grad_outputs_TBD, there, inside, KEPT)
        if norm_scale_D is not None:
            update = (1.0 - z) * n + z * read
            if skip_scale_D is not None:
                update += skip * read
            normal, inverse_deviation = normalised(update, statistics_TB2, position, inside, KEPT)
            sum_scale += grad * normal
            sum_shift += grad
            grad = norm_backward(grad, normal, inverse_deviation, scale, WIDTH)
        grad_n = grad * (1.0 - z) * (1.0 - n * n)
        grad_r = grad_n * load(memories_TBD, there, inside, KEPT) * r * (1.0 - r)
        grad_z = grad * (read - n) * z * (1.0 - z)
        grad_recalled = grad_n * r
        tl.store(grad_gates_TBG + at, grad_r, mask=inside)
        tl.store(grad_gates_TBG + at + HEARD, grad_z, mask=inside)
        tl.store(grad_gates_TBG + at + 2 * HEARD, grad_n, mask=inside)
        if grad_shares_TBG is not None:
            tl.store(grad_shares_TBG + at, grad_r, mask=inside)
            tl.store(grad_shares_TBG + at + HEARD, grad_z, mask=inside)
            tl.store(grad_shares_TBG + at + 2 * HEARD, grad_recalled, mask=inside)
        sum_candidate += grad_recalled
        grad_hidden = grad * z
        if skip_scale_D is not None:
            grad_hidden += skip * grad
            sum_skip += grad * read
        if recurrent_G is not None:
            grad_hidden += weight_r * grad_r + weight_z * grad_z + weight_n * grad_recalled
            sum_r += grad_r * read
            sum_z += grad_z * read
            sum_n += grad_recalled * read
        position -= num_rows
    tl.store(grad_hidden_BD + here, grad_hidden, mask=inside)
    tl.store(sum_candidate_BD + here, sum_candidate, mask=inside)
    if norm_scale_D is not None:
        tl.store(sum_scale_BD + here, sum_scale, mask=inside)
        tl.store(sum_shift_BD + here, sum_shift, mask=inside)
    if skip_scale_D is not None:
        tl.store(sum_skip_BD + here, sum_skip, mask=inside)
    if recurrent_G is not None:
        tl.store(sum_recurrent_BG + here_G, sum_r, mask=inside)
        tl.store(sum_recurrent_BG + here_G + HEARD, sum_z, mask=inside)
        tl.store(sum_recurrent_BG + here_G + 2 * HEARD, sum_n, mask=inside)
