"""One window of a recurrent cell on a GPU: its buffers, the order of its launches, and its gradients.

Forward is one product for the input's share of all gates, then at every position a product of the hidden state with the
recurrent weight and one fused kernel (`tritonsrc/`). Backward is one fused kernel and one product a position, then one
product over the whole window for each weight and for the input. A diagonal recurrence has no product a position: one
launch runs over the whole window.

Legend: B rows, T time, N = T * B, D width, E input width, H heads, K units that a unit hears from, X gates, C = X * K
all gates of one head side by side, G = H * C = X * D all gates.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from reprise.kernels import gpu_graphs
from reprise.kernels.gpu_graphs import Tensors, Window
from reprise.kernels.gpu_launch import BLOCK_UNITS, num_stages, num_warps, power_of_two, triton_dtype
from reprise.kernels.gpu_layout import CellInputs, Layout, Saved
from reprise.kernels.products import state_dtype


@dataclass(frozen=True)
class CellSteps:
    """The launches of a run of positions, forward or backward. Equal where they do the same work."""

    kernel: str
    layout: Layout
    backwards: bool

    def __call__(self, window: Window) -> None:
        if self.layout.is_diagonal:
            self._launch(window, start=window.num_steps - 1 if self.backwards else 0, num_steps=window.num_steps)
        elif self.backwards:
            self._backward(window)
        else:
            self._forward(window)

    def _forward(self, window: Window) -> None:
        reading_BD, share_HBC = window.state["reading_BD"], window.state["share_HBC"]
        weight_HCK = window.constants["weight_HCK"]
        assert reading_BD is not None and share_HBC is not None and weight_HCK is not None
        reading_HBK, weight_HKC = self.layout.heads_first(reading_BD), weight_HCK.transpose(1, 2)
        for t in range(window.num_steps):
            _multiply(reading_HBK, weight_HKC, out=share_HBC)
            self._launch(window, start=t, num_steps=1)

    def _backward(self, window: Window) -> None:
        share_HBK, weight_HCK = window.state["share_HBK"], window.constants["weight_HCK"]
        grad_TBG = _grad_shares(window)
        assert share_HBK is not None and weight_HCK is not None
        for t in reversed(range(window.num_steps)):
            self._launch(window, start=t, num_steps=1)
            _multiply(self.layout.heads_first(grad_TBG[t]), weight_HCK, out=share_HBK)

    def _launch(self, window: Window, *, start: int, num_steps: int) -> None:
        layout = self.layout
        block = power_of_two(layout.width)
        block = block if layout.has_norm else min(block, BLOCK_UNITS)
        arguments: dict[str, Any] = window.tensors()
        # Only the product reads it.
        arguments.pop("weight_HCK")
        kept = arguments["grad_hidden_BD" if self.backwards else "hidden_BD"].dtype
        _kernel(self.kernel)[layout.num_rows, -(-layout.width // block)](
            **arguments,
            start=start,
            num_steps=num_steps,
            num_rows=layout.num_rows,
            WIDTH=layout.width,
            HEARD=layout.heard,
            NUM_GATES=layout.num_gates,
            BLOCK=block,
            KEPT=triton_dtype(kept),
            STAGES=num_stages(block, kept) if layout.is_diagonal else 1,
            num_warps=num_warps(block),
        )


def _grad_shares(window: Window) -> Tensor:
    """The gradient of the products' results: the gates' own, where a cell has no other."""
    grad_TBG = window.results.get("grad_shares_TBG")
    grad_TBG = window.results["grad_gates_TBG"] if grad_TBG is None else grad_TBG
    assert grad_TBG is not None
    return grad_TBG


def _multiply(left_HBI: Tensor, right_HIO: Tensor, *, out: Tensor) -> None:
    """One product a head; one head is a plain product, for which libraries have more kernels to choose from."""
    if len(out) == 1:
        torch.mm(left_HBI[0], right_HIO[0], out=out[0])
    else:
        torch.bmm(left_HBI, right_HIO, out=out)


@cache
def _kernel(name: str) -> Any:
    """The Triton kernel `lstm_forward`, `lstm_backward`, `gru_forward` or `gru_backward`."""
    from reprise.kernels.tritonsrc import gru, lstm

    return getattr(gru if name.startswith("gru") else lstm, name)


def forward(
    inputs: CellInputs, hidden_BD: Tensor, cell_BD: Tensor | None, *, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Saved]:
    """Outputs [B, T, D], last hidden state and cell [B, D] (a GRU has none: empty); if `keep`, what backward reads."""
    layout, kept, product = Layout.of(inputs), state_dtype(inputs.product), inputs.product
    assert all(part is None or part.shape == (layout.num_rows, layout.width) for part in (hidden_BD, cell_BD))
    x_TBE = _time_first(inputs.x_BTE, product)
    drive_NG = torch.mm(x_TBE.flatten(0, 1), layout.by_head(inputs.input_GE.to(product)).flatten(0, 1).t())
    drive_TBG = drive_NG.view(*x_TBE.shape[:2], drive_NG.shape[1])
    constants = _constants(inputs, layout) | {
        "bias_G": _converted(layout.by_head(inputs.bias_G), kept),
        "norm_shift_D": _converted(inputs.norm_shift_D, kept),
    }
    hidden_BD = _cleared(hidden_BD, inputs.reset_BT, kept)
    share_HBC = None if layout.is_diagonal else x_TBE.new_empty(layout.share_shape(layout.num_gates))
    state: Tensors = {"hidden_BD": hidden_BD, "reading_BD": hidden_BD.to(product, copy=True), "share_HBC": share_HBC}
    memory_BD = x_TBE.new_empty(0, dtype=kept)
    if cell_BD is not None:
        state["memory_BD"] = memory_BD = _cleared(cell_BD, inputs.reset_BT, kept)
    if inputs.candidate_bias_D is not None:
        constants["candidate_bias_D"] = _converted(inputs.candidate_bias_D, kept)
    inputs_by_time: Tensors = {"drive_TBG": drive_TBG, "clear_TB": _clear(inputs.reset_BT)}
    outputs_TBD = x_TBE.new_empty((*x_TBE.shape[:2], layout.width))
    saved = allocate(inputs, keep=keep)
    results: Tensors = {name: part if part.numel() else None for name, part in saved._asdict().items()}
    window = Window(constants, inputs_by_time, state, {"outputs_TBD": outputs_TBD, **results})
    _run(CellSteps(f"{_family(inputs.kind)}_forward", layout, False), window)
    return outputs_TBD.transpose(0, 1), hidden_BD, memory_BD, saved


def _run(steps: CellSteps, window: Window) -> None:
    """Through graphs, where there is more than one launch. An empty batch has none."""
    if steps.layout.num_rows == 0:
        return
    assert all(part is None or part.is_contiguous() for part in window.tensors().values())
    if steps.layout.is_diagonal:
        steps(window)
    else:
        gpu_graphs.run(steps, window, backwards=steps.backwards)


def allocate(inputs: CellInputs, *, keep: bool) -> Saved:
    """Memory for what backward reads."""
    layout, kept = Layout.of(inputs), state_dtype(inputs.product)
    sizes = (layout.num_gates * layout.width, layout.width, layout.width, 2 if layout.has_norm else 0)
    dtypes = (kept, inputs.product, kept, kept)
    shape = (inputs.x_BTE.shape[1], layout.num_rows) if keep else (0, layout.num_rows)
    return Saved(
        *(inputs.x_BTE.new_empty((*shape, size), dtype=dtype) for size, dtype in zip(sizes, dtypes, strict=True))
    )


def backward(
    inputs: CellInputs,
    saved: Saved,
    *,
    grad_outputs_BTD: Tensor,
    grad_hidden_BD: Tensor,
    grad_cell_BD: Tensor | None,
) -> dict[str, Tensor]:
    """Gradients of all that are there, by name: those of CellInputs, and hidden_BD and cell_BD, the first state."""
    layout, kept, product = Layout.of(inputs), state_dtype(inputs.product), inputs.product
    share_HBK = None if layout.is_diagonal else saved.reads_TBD.new_zeros(layout.share_shape(1))
    # Copies, which turn from the last state's gradients to the first's.
    grad_hidden_BD = _cleared(grad_hidden_BD, None, kept)
    state: Tensors = {"grad_hidden_BD": grad_hidden_BD, "share_HBK": share_HBK}
    if grad_cell_BD is not None:
        state["grad_memory_BD"] = grad_cell_BD = _cleared(grad_cell_BD, None, kept)
    sums = _sums(inputs, layout, kept)
    grad_gates_TBG = torch.empty_like(saved.gates_TBG, dtype=product)
    results: Tensors = {"grad_gates_TBG": grad_gates_TBG}
    if inputs.kind == "gru":
        # Apart from the gates' own: in the candidate the reset gate comes between. The diagonal one is in the sums.
        results["grad_shares_TBG"] = None if layout.is_diagonal else torch.empty_like(grad_gates_TBG)
    inputs_by_time: Tensors = {
        "grad_outputs_TBD": _time_first(grad_outputs_BTD, product),
        **{name: part if part.numel() else None for name, part in saved._asdict().items()},
        "clear_TB": _clear(inputs.reset_BT),
    }
    window = Window(_constants(inputs, layout), inputs_by_time, state | sums, results)
    _run(CellSteps(f"{_family(inputs.kind)}_backward", layout, True), window)
    gradients = _weight_gradients(inputs, saved, sums, grad_gates_TBG, _grad_shares(window))
    if share_HBK is not None:
        grad_hidden_BD = grad_hidden_BD + share_HBK.transpose(0, 1).flatten(1)
    gradients = {name: part.to(getattr(inputs, name).dtype) for name, part in gradients.items()}
    gradients["hidden_BD"] = _cleared(grad_hidden_BD, inputs.reset_BT, kept)
    if grad_cell_BD is not None:
        gradients["cell_BD"] = _cleared(grad_cell_BD, inputs.reset_BT, kept)
    return gradients


def _weight_gradients(
    inputs: CellInputs, saved: Saved, sums: Tensors, grad_gates_TBG: Tensor, grad_shares_TBG: Tensor
) -> dict[str, Tensor]:
    """Gradients of input and weights, by name: a product each over all positions at once, or a sum made on the way."""
    layout = Layout.of(inputs)
    grad_gates_NG, x_TBE = grad_gates_TBG.flatten(0, 1), _time_first(inputs.x_BTE, inputs.product)
    grad_input_GE = torch.mm(grad_gates_NG.t(), x_TBE.flatten(0, 1))
    input_GE = layout.by_head(inputs.input_GE.to(inputs.product)).flatten(0, 1)
    totals = {name: part.sum(dim=0) for name, part in sums.items() if part is not None}
    if layout.is_diagonal:
        grad_recurrent_HCK = totals["sum_recurrent_BG"].view(1, -1, 1)
    else:
        grad_HCN = layout.heads_first(grad_shares_TBG.flatten(0, 1)).transpose(1, 2)
        reads_HNK = layout.heads_first(saved.reads_TBD.flatten(0, 1))
        grad_recurrent_HCK = torch.bmm(grad_HCN, reads_HNK)
    gradients = {
        "x_BTE": torch.mm(grad_gates_NG, input_GE).view(x_TBE.shape).transpose(0, 1),
        "input_GE": layout.by_gate(grad_input_GE.view(layout.num_heads, -1, grad_input_GE.shape[1])),
        "recurrent_GK": layout.by_gate(grad_recurrent_HCK),
        "bias_G": layout.by_gate(grad_gates_NG.sum(dim=0, dtype=saved.gates_TBG.dtype).view(layout.num_heads, -1)),
    }
    names = {"candidate_bias_D": "candidate", "norm_scale_D": "scale", "norm_shift_D": "shift", "skip_scale_D": "skip"}
    return gradients | {
        name: totals[f"sum_{sum_name}_BD"] for name, sum_name in names.items() if f"sum_{sum_name}_BD" in totals
    }


def _sums(inputs: CellInputs, layout: Layout, kept: torch.dtype) -> Tensors:
    """What backward adds up over time, row by row, so that the order of adding is always the same."""

    def zeros(is_there: bool, size: int = layout.width) -> Tensor | None:
        return inputs.x_BTE.new_zeros((layout.num_rows, size), dtype=kept) if is_there else None

    sums: Tensors = {
        "sum_scale_BD": zeros(layout.has_norm),
        "sum_shift_BD": zeros(layout.has_norm),
        "sum_skip_BD": zeros(inputs.skip_scale_D is not None),
        "sum_recurrent_BG": zeros(layout.is_diagonal, layout.num_gates * layout.width),
    }
    return sums | ({"sum_candidate_BD": zeros(True)} if inputs.kind == "gru" else {})


def _constants(inputs: CellInputs, layout: Layout) -> Tensors:
    """The weights that both directions read, laid out for them."""
    kept = state_dtype(inputs.product)
    recurrent_HCK = layout.by_head(inputs.recurrent_GK)
    return {
        "weight_HCK": None if layout.is_diagonal else _converted(recurrent_HCK, inputs.product),
        "recurrent_G": _converted(recurrent_HCK.flatten(), kept) if layout.is_diagonal else None,
        "norm_scale_D": _converted(inputs.norm_scale_D, kept),
        "skip_scale_D": _converted(inputs.skip_scale_D, kept),
    }


def _converted(part: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if part is None else part.to(dtype).contiguous()


def _time_first(part_BTD: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, B, D], contiguous."""
    return part_BTD.transpose(0, 1).to(dtype).contiguous()


def _cleared(part_BD: Tensor, reset_BT: Tensor | None, dtype: torch.dtype) -> Tensor:
    """A copy, zero in the rows that start anew at the first position."""
    if reset_BT is None:
        return part_BD.to(dtype, copy=True, memory_format=torch.contiguous_format)
    return part_BD.to(dtype).masked_fill(reset_BT[:, :1], 0.0).contiguous()


def _clear(reset_BT: Tensor | None) -> Tensor | None:
    """[T, B], not zero where the position after starts anew: a position leaves the state as the next one reads it."""
    if reset_BT is None:
        return None
    clear_TB = torch.zeros(reset_BT.shape[::-1], dtype=torch.uint8, device=reset_BT.device)
    clear_TB[:-1] = reset_BT.t()[1:]
    return clear_TB


def _family(kind: str) -> str:
    return "gru" if kind == "gru" else "lstm"
