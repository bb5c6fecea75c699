"""The language model: embedding, layers of a cell, output layer with its loss; parameter and operation counts.

Legend: B rows, T time, D width, E embedding width, V vocabulary, N tokens (B * T).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from reprise.cells.base import Cell, State
from reprise.cells.config import CellConfig
from reprise.kernels import keyed_random
from reprise.kernels.dispatch import pick
from reprise.kernels.products import mixed_linear, product_dtype
from reprise.runtime import UserError

ModelState = tuple[State, ...]

# Dropout sites that keys are folded with: word types, then the output of each layer (1, 2, ...).
_EMBEDDING_SITE = 0


@dataclass
class ModelConfig:
    """Sizes and regularisation of a language model; what recurs is in `cell`."""

    num_layers: int = 1
    width: int = 512
    # Width of the embedding, and of a projection before the output layer, if not the state's; null: the same.
    embedding_width: int | None = None
    # Share of units dropped after every layer: one mask a row, the same at every position (Gal and Ghahramani 2016).
    dropout: float = 0.0
    # Share of word types dropped, each at all its positions in a row's window (the same paper, section 4.2).
    embedding_dropout: float = 0.0
    # The output layer's weight is the embedding's (Press and Wolf 2017; Inan et al. 2017).
    tie_embeddings: bool = True
    # Layers after the first add their input to their output.
    layer_residual: bool = False
    cell: CellConfig = field(default_factory=CellConfig)

    def __post_init__(self) -> None:
        for key in ("num_layers", "width", "embedding_width"):
            if getattr(self, key) is not None and getattr(self, key) < 1:
                raise UserError(f"model.{key}={getattr(self, key)}: allowed: 1 or more")
        for key in ("dropout", "embedding_dropout"):
            if not 0.0 <= getattr(self, key) < 1.0:
                raise UserError(f"model.{key}={getattr(self, key)}: allowed: 0 up to but not including 1")
        # On the meta device a layer takes no memory; it refuses a width that its heads cannot share.
        with torch.device("meta"):
            layer = self.cell.build(self.width, self.width)
        if self.layer_residual and layer.has_residual_stream:
            raise UserError(f"model.layer_residual=true: a {self.cell.kind} adds its input itself; allowed: false")

    def build(self, *, vocab_size: int) -> "LanguageModel":
        """The model for a vocabulary, freshly initialised from torch's global generator.

        Raises:
            UserError: fewer than two words.
        """
        if vocab_size < 2:
            raise UserError(f"data.vocab_size={vocab_size}: allowed: 2 or more")
        return LanguageModel(self, vocab_size)


class LanguageModel(nn.Module):
    """Next-token model over `vocab_size` words. The hidden state is handed in and out; rows never see each other."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        width_in = config.width if config.embedding_width is None else config.embedding_width
        self.embedding = nn.Embedding(vocab_size, width_in)
        widths_in = (width_in, *(config.width,) * (config.num_layers - 1))
        layers: list[Cell] = [config.cell.build(width, config.width) for width in widths_in]
        self.projection = None if width_in == config.width else nn.Parameter(torch.empty(width_in, config.width))
        self.layers = nn.ModuleList(layers)
        self.final_norm = nn.LayerNorm(config.width) if layers[-1].has_residual_stream else None
        # A tied output layer has no weight of its own, so that no way of loading weights can untie it.
        self.output_weight = None if config.tie_embeddings else nn.Parameter(torch.empty(vocab_size, width_in))
        self.output_bias = nn.Parameter(torch.zeros(vocab_size))
        # Logits of a normed hidden state start with a variance of one.
        nn.init.normal_(self.embedding.weight, std=width_in**-0.5)
        if self.output_weight is not None:
            nn.init.normal_(self.output_weight, std=width_in**-0.5)
        if self.projection is not None:
            nn.init.xavier_uniform_(self.projection)

    def initial_state(self, batch_size: int, device: torch.device | str | None = None) -> ModelState:
        """Zeros for `batch_size` rows, one state a layer."""
        return tuple(layer.initial_state(batch_size, device) for layer in self._cells())

    def forward(
        self,
        tokens_BT: Tensor,
        state: ModelState,
        reset_BT: Tensor | None = None,
        dropout_keys_B: Tensor | None = None,
    ) -> tuple[Tensor, ModelState]:
        """Hidden states [B, T, D] before the output layer, and the state after the window.

        `reset_BT` (bool): a row's state is zero before that position. `dropout_keys_B` (int64, one a row): with keys,
        dropout is on and a row's masks depend on its key only; without, it is off. The train/eval mode has no say.
        """
        # The embedding's entries are small, as the tied output layer needs them; a cell wants a variance of one.
        hidden_BTD = self.embedding(tokens_BT) * self.embedding.embedding_dim**0.5
        if dropout_keys_B is not None and self.config.embedding_dropout > 0.0:
            hidden_BTD = hidden_BTD * self._word_mask(tokens_BT, dropout_keys_B).unsqueeze(-1)
        new_state = []
        for index, layer in enumerate(self._cells()):
            output_BTD, layer_state = layer(hidden_BTD, state[index], reset_BT)
            new_state.append(layer_state)
            if self.config.layer_residual and index > 0:
                output_BTD = output_BTD + hidden_BTD
            if dropout_keys_B is not None and self.config.dropout > 0.0:
                mask_BD = self._unit_mask(dropout_keys_B, index + 1)
                # What a residual stream carries already is kept, or little would be left of it after many layers.
                keeps_stream = layer.has_residual_stream and output_BTD.shape == hidden_BTD.shape
                output_BTD = _masked(output_BTD, mask_BD, base_BTD=hidden_BTD if keeps_stream else None)
            hidden_BTD = output_BTD
        return hidden_BTD if self.final_norm is None else self.final_norm(hidden_BTD), tuple(new_state)

    def _cells(self) -> Iterator[Cell]:
        return iter(cast(list[Cell], list(self.layers)))

    def _word_mask(self, tokens_BT: Tensor, keys_B: Tensor) -> Tensor:
        """[B, T]: 0 for a dropped word type, else the scale that keeps the mean; never a mask over the vocabulary."""
        word_keys_BT = keyed_random.fold(keyed_random.fold(keys_B, _EMBEDDING_SITE).unsqueeze(1), tokens_BT)
        kept_BT = keyed_random.uniform(word_keys_BT, 1)[..., 0] >= self.config.embedding_dropout
        return kept_BT.to(self.embedding.weight.dtype) / (1.0 - self.config.embedding_dropout)

    def _unit_mask(self, keys_B: Tensor, site: int) -> Tensor:
        """[B, D]: 0 for a dropped unit, else the scale that keeps the mean."""
        kept_BD = keyed_random.uniform(keyed_random.fold(keys_B, site), self.config.width) >= self.config.dropout
        return kept_BD.to(torch.float32) / (1.0 - self.config.dropout)

    def _output_weight(self) -> Tensor:
        return self.embedding.weight if self.output_weight is None else self.output_weight

    def _project(self, hidden_BTD: Tensor) -> Tensor:
        """What the output layer reads, [B, T, E]: the hidden state, projected where the embedding is narrower."""
        if self.projection is None:
            return hidden_BTD
        product = product_dtype(self.projection)
        return mixed_linear(hidden_BTD, self.projection, product).to(product)

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Scores of every next token, [B, T, V], fp32."""
        weight_VE = self._output_weight()
        return mixed_linear(self._project(hidden_BTD), weight_VE, product_dtype(weight_VE)) + self.output_bias

    def loss_sum(
        self, hidden_BTD: Tensor, targets_BT: Tensor, *, label_smoothing: float = 0.0, z_loss: float = 0.0
    ) -> Tensor:
        """Summed negative log-likelihood, nats, of the targets that are not -100: a scalar, fp32.

        With `label_smoothing` or `z_loss` what training minimises instead: see `reference.linear_cross_entropy`.
        """
        weight_VE = self._output_weight()
        kernel = pick("linear_cross_entropy", hidden_BTD.device.type, product_dtype(weight_VE), "auto")
        read_NE = self._project(hidden_BTD).flatten(0, 1)
        total: Tensor = kernel(
            read_NE,
            weight_VE,
            self.output_bias,
            targets_BT.flatten(),
            label_smoothing=label_smoothing,
            z_loss=z_loss,
        )
        return total

    def num_parameters(self) -> int:
        """Parameters, a tied weight once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def flops_per_token(self) -> int:
        """Floating-point operations of the matrix products, forward and backward, a token (a multiply-add is two).

        Backward does each product twice, for the input and for the weight: three products in all. The embedding is a
        look-up and counts nothing.
        """
        multiplied = sum(layer.multiply_adds_per_token() for layer in self._cells()) + self._output_weight().numel()
        multiplied += 0 if self.projection is None else self.projection.numel()
        return 3 * 2 * multiplied


def _masked(output_BTD: Tensor, mask_BD: Tensor, *, base_BTD: Tensor | None) -> Tensor:
    """The output times the mask at every position, or only what the output adds to a base."""
    mask_B1D = mask_BD.to(output_BTD.dtype).unsqueeze(1)
    return output_BTD * mask_B1D if base_BTD is None else base_BTD + (output_BTD - base_BTD) * mask_B1D
