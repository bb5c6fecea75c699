"""The contract of a cell: (input, state) -> (output, state), over one step or over a window.

Legend: B rows, T time, D width, E input width.
"""

import torch
from torch import Tensor, nn

State = tuple[Tensor, ...]


class Cell(nn.Module):
    """One recurrent layer. Its state is handed in and out, and is never a buffer of the module.

    A subclass sets `width`, `state_parts` and the two counts, and defines `forward`; a faster `step` is up to it.
    """

    width: int
    # Tensors that make up the state, fp32, rows first: [B, D] each, unless the cell says otherwise.
    state_parts: int
    # No position hears a later one, so that the next token can be predicted.
    is_causal = True
    # The output is the input plus what the cell found: it wants a norm before the output layer, and dropout on what is
    # added only.
    has_residual_stream = False
    # The switches of CellConfig that this kind has, and the structures of its recurrent product.
    switches: tuple[str, ...] = ()
    recurrences: tuple[str, ...] = ("full",)

    def initial_state(self, batch_size: int, device: torch.device | str | None = None) -> State:
        """Zeros, fp32 (fp64 for a model in fp64), `state_parts` tensors of shape [batch_size, width]."""
        example = next(self.parameters())
        dtype = torch.promote_types(example.dtype, torch.float32)
        shape = (batch_size, self.width)
        where = example.device if device is None else device
        return tuple(torch.zeros(shape, dtype=dtype, device=where) for _ in range(self.state_parts))

    def step(self, x_BE: Tensor, state: State) -> tuple[Tensor, State]:
        """One position: x [B, E] and the state before it give y [B, D] and the state after it."""
        y_BTD, state = self(x_BE.unsqueeze(1), state, None)
        return y_BTD[:, 0], state

    def forward(self, x_BTE: Tensor, state: State, reset_BT: Tensor | None) -> tuple[Tensor, State]:
        """A window: x [B, T, E] gives y [B, T, D] and the state after the last position.

        Where `reset_BT` (bool) is true, that row's state is zero before that position is read. The state comes back
        attached to the graph: whoever carries it to the next window detaches it.
        """
        raise NotImplementedError

    def matmul_parameters(self) -> int:
        """Weights that one token is multiplied with: what the count of operations is made from."""
        raise NotImplementedError

    def multiply_adds_per_token(self) -> int:
        """Multiply-adds of one token's matrix products, forward: one a weight, and those of states with states."""
        return self.matmul_parameters()
