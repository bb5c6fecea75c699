"""The linear scan h_t = a_t * h_{t-1} + v_t as Triton kernels, forward and backward.

A program works on BLOCK units of one row, its state in registers, from the first position to the last and back.

Legend: B rows, T time, D width.
"""

import triton
import triton.language as tl

from reprise.kernels.tritonsrc.elementwise import load


@triton.jit
def scan_forward(
    decay_BTD,
    value_BTD,
    initial_BD,
    reset_BT,
    states_BTD,
    num_steps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    KEPT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """All states of the window, in the kept format."""
    row = tl.program_id(0).to(tl.int64)
    unit = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = unit < WIDTH
    state = load(initial_BD, row * WIDTH + unit, inside, KEPT)
    position = row * num_steps
    for _ in tl.range(num_steps, num_stages=STAGES):
        if reset_BT is not None:
            state = tl.where(tl.load(reset_BT + position) != 0, 0.0, state)
        at = position * WIDTH + unit
        state = load(decay_BTD, at, inside, KEPT) * state + load(value_BTD, at, inside, KEPT)
        tl.store(states_BTD + at, state, mask=inside)
        position += 1


@triton.jit
def scan_backward(
    decay_BTD,
    initial_BD,
    reset_BT,
    states_BTD,
    grad_states_BTD,
    grad_decay_BTD,
    grad_value_BTD,
    grad_initial_BD,
    num_steps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    KEPT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A state's gradient is its own and the next one's times the next decay. It is the value's gradient too."""
    row = tl.program_id(0).to(tl.int64)
    unit = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = unit < WIDTH
    initial = load(initial_BD, row * WIDTH + unit, inside, KEPT)
    grad = tl.zeros_like(initial)
    first = row * num_steps
    position = first + num_steps - 1
    for _ in tl.range(num_steps, num_stages=STAGES):
        at = position * WIDTH + unit
        grad += load(grad_states_BTD, at, inside, KEPT)
        # Before the first position stands the initial state; what is loaded instead is another state of the row.
        before = load(states_BTD, tl.maximum(position - 1, first) * WIDTH + unit, inside, KEPT)
        previous = tl.where(position == first, initial, before)
        tl.store(grad_value_BTD + at, grad, mask=inside)
        grad_decay, grad = grad * previous, grad * load(decay_BTD, at, inside, KEPT)
        if reset_BT is not None:
            is_reset = tl.load(reset_BT + position) != 0
            grad_decay, grad = tl.where(is_reset, 0.0, grad_decay), tl.where(is_reset, 0.0, grad)
        tl.store(grad_decay_BTD + at, grad_decay, mask=inside)
        position -= 1
    tl.store(grad_initial_BD + row * WIDTH + unit, grad, mask=inside)
