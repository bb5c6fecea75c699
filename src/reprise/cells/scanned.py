"""Cells whose gates hear the input only, so that a window is one product and one linear scan: minGRU, minLSTM, RG-LRU.

The equations are in `kernels/reference_scan.py` and in the classes below. Nothing but the scan runs over time, so no
unit hears another one's past inside a layer: what these cells lack in one layer, they are given by more layers.

Legend: B rows, T time, D width, E input width, G all gates side by side.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from reprise.cells.base import Cell, State
from reprise.kernels.dispatch import KERNELS, pick
from reprise.kernels.products import product_dtype
from reprise.kernels.reference_scan import DECAY_POWER, MinimalWeights, RgLruWeights
from reprise.runtime import UserError

if TYPE_CHECKING:
    from reprise.cells.config import CellConfig

# The RG-LRU's decay a step where its recurrence gate is one, at the start (De et al. 2024, section 2.4).
SLOWEST_DECAY, FASTEST_DECAY = 0.999, 0.9


class ScannedCell(Cell):
    """The weights of all gates and the choice of kernel. The state is (h [B, D],)."""

    state_parts = 1
    num_gates: int

    def __init__(self, config: "CellConfig", width_in: int, width: int) -> None:
        super().__init__()
        implementations = ("auto", *KERNELS[config.kind])
        if config.implementation not in implementations:
            raise UserError(
                f"model.cell.implementation={config.implementation}: a {config.kind} has none of this name; "
                f"allowed: {', '.join(implementations)}"
            )
        self.config = config
        self.width = width
        self.input_weight = nn.Parameter(torch.empty(self.num_gates * width, width_in))
        self.bias = nn.Parameter(torch.empty(self.num_gates * width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier-uniform matrices gate by gate (Glorot and Bengio 2010), zero biases.

        A bias of one that keeps the state, as in the LSTM, was measured and lost: after 250 steps of the default
        settings minGRU stood at val/loss 4.89 instead of 4.83, minLSTM at 4.85 instead of 4.83.
        """
        for block in self.input_weight.detach().chunk(self.num_gates):
            nn.init.xavier_uniform_(block)
        nn.init.zeros_(self.bias)

    def weights(self) -> MinimalWeights | RgLruWeights:
        """The parameters as the kernel takes them."""
        return MinimalWeights(self.input_weight, self.bias)

    def forward(self, x_BTE: Tensor, state: State, reset_BT: Tensor | None) -> tuple[Tensor, State]:
        product = product_dtype(self.input_weight)
        kernel = pick(self.config.kind, x_BTE.device.type, product, self.config.implementation)
        result: tuple[Tensor, State] = kernel(x_BTE, state, reset_BT, self.weights())
        return result

    def matmul_parameters(self) -> int:
        return self.input_weight.numel()

    def extra_repr(self) -> str:
        return f"{self.input_weight.shape[1]} -> {self.width}, {self.config.implementation}"


class MinGruCell(ScannedCell):
    """minGRU (Feng et al. 2024, "Were RNNs All We Needed?", arXiv:2410.01201, section 3.1). Gates in the order z, n::

    z = sigmoid(W_z x_t + b_z)
    n = W_n x_t + b_n
    h_t = (1 - z) * h_{t-1} + z * n
    """

    num_gates = 2


class MinLstmCell(ScannedCell):
    """minLSTM (the same paper, section 3.2). Gates in the order f, i, n::

    f, i = sigmoid(W x_t + b)
    n = W_n x_t + b_n
    h_t = f / (f + i) * h_{t-1} + i / (f + i) * n
    """

    num_gates = 3


class RgLruCell(ScannedCell):
    """RG-LRU (De et al. 2024, "Griffin", arXiv:2402.19427, section 2.4). Gates in the order r, i, u::

        r, i = sigmoid(W x_t + b)
        u = W_u x_t + b_u
        a = sigmoid(decay_logit)^(8 r)
        h_t = a * h_{t-1} + sqrt(1 - a^2) * (i * u)

    u stands for the linear layer before the unit in the paper's recurrent block, and r and i read the layer's input
    as u does, so that all three are one product. The block's convolution and its second branch are not part of it.
    """

    num_gates = 3

    def __init__(self, config: "CellConfig", width_in: int, width: int) -> None:
        super().__init__(config, width_in, width)
        # Spread evenly between the fastest and the slowest.
        decay_D = torch.empty(width, dtype=torch.float64).uniform_(FASTEST_DECAY, SLOWEST_DECAY)
        self.decay_logit = nn.Parameter(torch.logit(decay_D ** (1.0 / DECAY_POWER)).to(self.bias.dtype))

    def weights(self) -> RgLruWeights:
        return RgLruWeights(self.input_weight, self.bias, self.decay_logit)
