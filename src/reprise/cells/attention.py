"""Transformer layers: a decoder layer whose key/value cache is its state, and an encoder layer that hears both sides.

The layers to compare recurrent ones with. Both are pre-norm blocks (Xiong et al. 2020) with the parameters of the
field's reference layer (BERT-base, GPT-2 small: 12 layers of 768 units and 12 heads), positions by rotation::

    a = x + attention(norm(x))
    y = a + down(gelu(up(norm(a))))

The residual stream x, a, y stays in fp32; products run in autocast's format. The equations of attention are in
`kernels/reference_attention.py`.

Legend: B rows, T time, D width, E input width, C slots of the cache.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, linear

from reprise.cells.base import Cell, State
from reprise.kernels.dispatch import KERNELS, pick
from reprise.kernels.products import mixed_linear, product_dtype, state_dtype
from reprise.kernels.reference import NORM_EPSILON
from reprise.runtime import UserError

if TYPE_CHECKING:
    from reprise.cells.config import CellConfig

# Units of the hidden layer between attentions, as a multiple of the width (Vaswani et al. 2017, section 3.3).
MLP_FACTOR = 4


class TransformerLayer(Cell):
    """Parameters of a block and what surrounds attention; a subclass says which positions hear each other."""

    has_residual_stream = True
    kernel: str

    def __init__(self, config: "CellConfig", width_in: int, width: int) -> None:
        super().__init__()
        self._check(config, width)
        self.config = config
        self.width = width
        # Only where the embedding has another width than the residual stream.
        self.input_weight = None if width_in == width else nn.Parameter(torch.empty(width, width_in))
        self.attention_norm_scale = nn.Parameter(torch.ones(width))
        self.attention_norm_shift = nn.Parameter(torch.zeros(width))
        # Query, key and value side by side: one product.
        self.attention_in_weight = nn.Parameter(torch.empty(3 * width, width))
        self.attention_in_bias = nn.Parameter(torch.zeros(3 * width))
        self.attention_out_weight = nn.Parameter(torch.empty(width, width))
        self.attention_out_bias = nn.Parameter(torch.zeros(width))
        self.mlp_norm_scale = nn.Parameter(torch.ones(width))
        self.mlp_norm_shift = nn.Parameter(torch.zeros(width))
        self.up_weight = nn.Parameter(torch.empty(MLP_FACTOR * width, width))
        self.up_bias = nn.Parameter(torch.zeros(MLP_FACTOR * width))
        self.down_weight = nn.Parameter(torch.empty(width, MLP_FACTOR * width))
        self.down_bias = nn.Parameter(torch.zeros(width))
        # Glorot and Bengio 2010; query, key and value each for themselves.
        for matrix in (*self.attention_in_weight.detach().chunk(3), *self._matrices()[1:]):
            nn.init.xavier_uniform_(matrix)

    def _check(self, config: "CellConfig", width: int) -> None:
        implementations = ("auto", *KERNELS[self.kernel])
        if config.implementation not in implementations:
            raise UserError(
                f"model.cell.implementation={config.implementation}: a {config.kind} has none of this name; "
                f"allowed: {', '.join(implementations)}"
            )
        if config.head_width(width) % 2 != 0:
            raise UserError(
                f"model.cell.num_heads={config.num_heads}: heads of {config.head_width(width)} units; "
                "allowed: an even number of units, which rotary positions turn in pairs"
            )

    def _matrices(self) -> list[nn.Parameter]:
        weights = [self.attention_in_weight, self.attention_out_weight, self.up_weight, self.down_weight]
        return weights + ([] if self.input_weight is None else [self.input_weight])

    def forward(self, x_BTE: Tensor, state: State, reset_BT: Tensor | None) -> tuple[Tensor, State]:
        """As the contract says; y is the residual stream in fp32, not normed, whatever the format of the products."""
        product = product_dtype(self.attention_out_weight)
        kept = state_dtype(product)
        with torch.autocast(x_BTE.device.type, enabled=False):
            if self.input_weight is None:
                stream_BTD = x_BTE.to(kept)
            else:
                stream_BTD = mixed_linear(x_BTE, self.input_weight, product)
            read_BTD = _normed(stream_BTD, self.attention_norm_scale, self.attention_norm_shift).to(product)
            parts_BTD = linear(read_BTD, self.attention_in_weight.to(product), self.attention_in_bias.to(product))
            heard_BTD, state = self._attend(parts_BTD.chunk(3, dim=-1), state, reset_BT)
            stream_BTD = stream_BTD + mixed_linear(heard_BTD, self.attention_out_weight, product)
            stream_BTD = stream_BTD + self.attention_out_bias
            read_BTD = _normed(stream_BTD, self.mlp_norm_scale, self.mlp_norm_shift).to(product)
            hidden_BTF = gelu(linear(read_BTD, self.up_weight.to(product), self.up_bias.to(product)))
            stream_BTD = stream_BTD + mixed_linear(hidden_BTF, self.down_weight, product) + self.down_bias
        return stream_BTD, state

    def _attend(self, parts_BTD: tuple[Tensor, ...], state: State, reset_BT: Tensor | None) -> tuple[Tensor, State]:
        """What attention makes of (query, key, value), and the state after it."""
        raise NotImplementedError

    def matmul_parameters(self) -> int:
        return sum(weight.numel() for weight in self._matrices())

    def extra_repr(self) -> str:
        return f"width {self.width}, {self.config.num_heads} heads, {self.config.implementation}"


class TransformerCell(TransformerLayer):
    """Causal: a position hears itself and the `context` positions before it that are of its own document.

    That bound, and not the window, is the reach: however a text is cut into windows, the outputs are the same. The
    state is (keys [B, C, D], values [B, C, D], filled slots [B]), the newest position last; all zeros is an empty
    cache. Gradients end where the state is detached, as a recurrent cell's do (Transformer-XL, Dai et al. 2019).
    """

    state_parts = 3
    kernel = "attention"

    def initial_state(self, batch_size: int, device: torch.device | str | None = None) -> State:
        """Empty caches, fp32 (fp64 for a model in fp64)."""
        like = self.attention_out_weight
        dtype = torch.promote_types(like.dtype, torch.float32)
        where = like.device if device is None else device
        cache = (batch_size, self.config.context, self.width)
        return tuple(torch.zeros(shape, dtype=dtype, device=where) for shape in (cache, cache, (batch_size,)))

    def _attend(self, parts_BTD: tuple[Tensor, ...], state: State, reset_BT: Tensor | None) -> tuple[Tensor, State]:
        attend = pick(self.kernel, parts_BTD[0].device.type, parts_BTD[0].dtype, self.config.implementation)
        result: tuple[Tensor, State] = attend(*parts_BTD, state, reset_BT, num_heads=self.config.num_heads)
        return result

    def multiply_adds_per_token(self) -> int:
        """With a full cache: a product with every key heard, and one with every value."""
        return self.matmul_parameters() + 2 * (self.config.context + 1) * self.width


class TransformerEncoderCell(TransformerLayer):
    """Bidirectional: a position hears every position of its own document in the window. Stateless: the state is ()."""

    state_parts = 0
    kernel = "document_attention"
    is_causal = False

    def step(self, x_BE: Tensor, state: State) -> tuple[Tensor, State]:
        raise UserError("model.cell.kind=transformer_encoder: hears both sides, so it reads whole windows, not steps")

    def _attend(self, parts_BTD: tuple[Tensor, ...], state: State, reset_BT: Tensor | None) -> tuple[Tensor, State]:
        assert state == (), "an encoder carries nothing from window to window"
        attend = pick(self.kernel, parts_BTD[0].device.type, parts_BTD[0].dtype, self.config.implementation)
        heard_BTD: Tensor = attend(*parts_BTD, reset_BT, num_heads=self.config.num_heads)
        return heard_BTD, state

    def multiply_adds_per_token(self) -> int:
        """For windows of `context` positions: a product with every key of the window, and one with every value."""
        return self.matmul_parameters() + 2 * self.config.context * self.width


def _normed(stream_BTD: Tensor, scale_D: Tensor, shift_D: Tensor) -> Tensor:
    kept = stream_BTD.dtype
    return layer_norm(stream_BTD, stream_BTD.shape[-1:], scale_D.to(kept), shift_D.to(kept), NORM_EPSILON)
