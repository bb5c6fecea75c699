"""LSTM and GRU with switches: coupled forget/input gate, layer norm on the hidden state, skip between time steps.

The recurrence is full, block (heads) or diagonal. The equations are in `kernels/reference.py`. Parameters have the same
names, shapes and order of gates whatever implementation runs, so weights and checkpoints move between implementations.

Legend: B rows, T time, D width, E input width, G all gates side by side, K units that a unit hears from.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from reprise.cells.base import Cell, State
from reprise.kernels.dispatch import Kernel, pick
from reprise.kernels.products import product_dtype
from reprise.kernels.reference import GruWeights, LstmWeights

if TYPE_CHECKING:
    from reprise.cells.config import CellConfig

# The entries of a diagonal matrix are its eigenvalues: within 1/2 no unit starts by feeding itself up. Starts from 0.1
# and from 1.0 learned as well (val/loss within 0.003 nats after 400 steps, 256 units).
_DIAGONAL_INIT = 0.5


class GatedCell(Cell):
    """Weights, norm and choice of kernel, shared by the LSTM and the GRU family."""

    num_gates: int
    switches: tuple[str, ...] = ("layer_norm", "temporal_residual")
    recurrences = ("full", "block", "diagonal")

    def __init__(self, config: "CellConfig", width_in: int, width: int) -> None:
        super().__init__()
        self.config = config
        self.width = width
        self.input_weight = nn.Parameter(torch.empty(self.num_gates * width, width_in))
        self.recurrent_weight = nn.Parameter(torch.empty(self.num_gates * width, config.heard_units(width)))
        self.bias = nn.Parameter(torch.empty(self.num_gates * width))
        if config.layer_norm:
            self.norm_scale = nn.Parameter(torch.empty(width))
            self.norm_shift = nn.Parameter(torch.empty(width))
        self.skip_scale = nn.Parameter(torch.empty(width)) if config.temporal_residual else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier-uniform matrices, gate by gate and head by head (Glorot and Bengio 2010), zero biases."""
        for block in self.input_weight.detach().chunk(self.num_gates):
            nn.init.xavier_uniform_(block)
        if self.config.recurrence == "diagonal":
            nn.init.uniform_(self.recurrent_weight, -_DIAGONAL_INIT, _DIAGONAL_INIT)
        else:
            num_rows, heard = self.recurrent_weight.shape
            for block in self.recurrent_weight.detach().chunk(num_rows // heard):
                nn.init.xavier_uniform_(block)
        nn.init.zeros_(self.bias)
        if self.config.layer_norm:
            nn.init.constant_(self.norm_scale, self.config.norm_init)
            nn.init.zeros_(self.norm_shift)
        if self.skip_scale is not None:
            nn.init.constant_(self.skip_scale, self.config.residual_init)

    def matmul_parameters(self) -> int:
        # A diagonal recurrence is an elementwise product.
        recurrent = 0 if self.config.recurrence == "diagonal" else self.recurrent_weight.numel()
        return self.input_weight.numel() + recurrent

    def kernel(self, device: str) -> Kernel:
        """What runs a window on a device type, in the formats that now hold."""
        product, switches = product_dtype(self.recurrent_weight), self.config.kernel_switches()
        return pick(self.config.kind, device, product, self.config.implementation, switches=switches)

    def norm(self) -> tuple[Tensor | None, Tensor | None]:
        """Scale and shift of the norm on the hidden state, or a pair of None."""
        return (self.norm_scale, self.norm_shift) if self.config.layer_norm else (None, None)

    def extra_repr(self) -> str:
        switches = ", ".join(self.config.kernel_switches()) or "no switch"
        return f"{self.input_weight.shape[1]} -> {self.width}, {switches}, {self.config.implementation}"


class LstmCell(GatedCell):
    """Gates in the order o, f, i, z (coupled: o, f, z); the state is (h, c). Equations: `kernels.reference.lstm`."""

    state_parts = 2
    switches = ("coupled_gates", "layer_norm", "temporal_residual")

    def __init__(self, config: "CellConfig", width_in: int, width: int) -> None:
        self.num_gates = 3 if config.coupled_gates else 4
        super().__init__(config, width_in, width)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        with torch.no_grad():
            self.bias[self.width : 2 * self.width] = self.config.forget_bias

    def forward(self, x_BTE: Tensor, state: State, reset_BT: Tensor | None) -> tuple[Tensor, State]:
        """As `Cell.forward`, on the kernel that the config and the device choose.

        Shapes, formats and equations: `kernels.reference.lstm`. Raises UserError where the implementation asked for
        does not run here, or not in the format of the products.
        """
        kernel = self.kernel(x_BTE.device.type)
        weights = LstmWeights(self.input_weight, self.recurrent_weight, self.bias, *self.norm(), self.skip_scale)
        result: tuple[Tensor, State] = kernel(x_BTE, state, reset_BT, weights, coupled_gates=self.config.coupled_gates)
        return result


class GruCell(GatedCell):
    """Gates in the order r, z, n; the state is (h,). Equations: `kernels.reference.gru`."""

    state_parts = 1
    num_gates = 3

    def __init__(self, config: "CellConfig", width_in: int, width: int) -> None:
        super().__init__(config, width_in, width)
        self.candidate_bias = nn.Parameter(torch.zeros(width))

    def forward(self, x_BTE: Tensor, state: State, reset_BT: Tensor | None) -> tuple[Tensor, State]:
        """As `Cell.forward`, on the kernel that the config and the device choose.

        Shapes, formats and equations: `kernels.reference.gru`. Raises UserError where the implementation asked for
        does not run here, or not in the format of the products.
        """
        kernel = self.kernel(x_BTE.device.type)
        weights = GruWeights(
            self.input_weight, self.recurrent_weight, self.bias, self.candidate_bias, *self.norm(), self.skip_scale
        )
        result: tuple[Tensor, State] = kernel(x_BTE, state, reset_BT, weights)
        return result
