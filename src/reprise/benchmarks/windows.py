"""One layer over one window, forward and backward: what cells and their rivals are timed on.

Legend: B rows, T time, D width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reprise.benchmarks.machine import Place, short_name
from reprise.benchmarks.timing import Side
from reprise.cells.base import Cell, State
from reprise.cells.config import CellConfig
from reprise.kernels.dispatch import KERNELS, Kernel, pick

# A state that a training window might begin with: not zero, not saturated.
_STATE_SCALE = 0.3


@dataclass(frozen=True)
class Size:
    """Width of input and state, rows and positions of a window."""

    width: int
    num_rows: int
    num_steps: int

    @property
    def tokens(self) -> int:
        """Positions of all rows."""
        return self.num_rows * self.num_steps

    def facts(self) -> dict[str, Any]:
        """As a record has it."""
        return {"width": self.width, "num_rows": self.num_rows, "num_steps": self.num_steps}

    def __str__(self) -> str:
        return f"{self.width}x{self.num_rows}"


class ForwardBackward:
    """A call runs forward, then asks for the gradient of every leaf, given fixed random gradients of all outputs."""

    def __init__(self, forward: Callable[[], Sequence[Tensor]], leaves: Sequence[Tensor]) -> None:
        self._forward = forward
        self._leaves = list(leaves)
        self._grad_outputs: list[Tensor] | None = None

    def __call__(self) -> tuple[Tensor, ...]:
        outputs = self._forward()
        if self._grad_outputs is None:
            self._grad_outputs = [torch.randn_like(output) for output in outputs]
        return torch.autograd.grad(outputs, self._leaves, self._grad_outputs)


def window_input(size: Size, place: Place, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random input [B, T, D] that wants a gradient; the same numbers every time."""
    generator = torch.Generator().manual_seed(size.width)
    values = torch.randn(size.num_rows, size.num_steps, size.width, generator=generator)
    return values.to(place.device, dtype).requires_grad_()


def window_state(size: Size, place: Place, *, num_parts: int, dtype: torch.dtype = torch.float32) -> State:
    """Random state, `num_parts` tensors [B, D] that want gradients."""
    generator = torch.Generator().manual_seed(size.num_rows)
    values = torch.randn(num_parts, size.num_rows, size.width, generator=generator) * _STATE_SCALE
    return tuple(part.to(place.device, dtype).requires_grad_() for part in values)


def build_cell(config: CellConfig, size: Size, place: Place) -> Cell:
    """A layer with weights that depend on its settings only."""
    torch.manual_seed(size.width)
    return config.build(size.width, size.width).to(place.device)


def cell_side(
    name: str,
    config: CellConfig,
    *,
    size: Size,
    place: Place,
    product: torch.dtype,
    reset_BT: Tensor | None = None,
) -> Side:
    """A cell of ours as training runs it: fp32 parameters and state, products in `product`."""
    cell = build_cell(config, size, place)
    x_BTD, state = window_input(size, place), window_state(size, place, num_parts=cell.state_parts)

    def forward() -> tuple[Tensor, ...]:
        with place.autocast(product):
            y_BTD, last = cell(x_BTD, state, reset_BT)
        return y_BTD, *last

    facts = {
        "kind": config.kind,
        "switches": list(config.switches()),
        "recurrence": config.recurrence,
        "products": short_name(product),
        "implementation": cell_implementation(config, place, product),
    }
    leaves = [x_BTD, *state, *cell.parameters()]
    return Side(name, ForwardBackward(forward, leaves), size.tokens, size.facts() | facts)


def cell_implementation(config: CellConfig, place: Place, product: torch.dtype) -> str:
    """The implementation that a cell's kernel really is here."""
    kernel = pick(config.kind, place.device.type, product, config.implementation, switches=config.kernel_switches())
    return implementation_of(config.kind, kernel)


def implementation_of(kernel_name: str, kernel: Kernel) -> str:
    """The name under which a kernel that `pick` handed out is registered."""
    return next(name for name, candidate in KERNELS[kernel_name].items() if candidate is kernel)
