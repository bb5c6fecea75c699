"""What people use instead: the library's recurrent layers, packed documents, and a plain word language model.

Each is given its best: the library's layers in their own order of dimensions, index arithmetic done beforehand.

Legend: B rows, T time, D width, N documents (or parts of them), L length of the longest one, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax, nll_loss
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from reprise.benchmarks.machine import Place, short_name
from reprise.benchmarks.timing import Side
from reprise.benchmarks.windows import ForwardBackward, Size, window_input, window_state
from reprise.cells.base import State

LAYERS: dict[str, type[nn.LSTM] | type[nn.GRU]] = {"lstm": nn.LSTM, "gru": nn.GRU}
# How a layer of the library gets its products in bf16: by autocast, or by weights that are bf16.
BF16_WAYS = ("autocast", "weights")


def library_layer(kind: str, size: Size, place: Place, *, batch_first: bool = False) -> nn.LSTM | nn.GRU:
    """nn.LSTM or nn.GRU of that width, in fp32, with weights that depend on the width only."""
    torch.manual_seed(size.width)
    return LAYERS[kind](size.width, size.width, batch_first=batch_first).to(place.device)


def library_side(name: str, kind: str, *, size: Size, place: Place, bf16: str | None = None) -> Side:
    """The library's LSTM or GRU over a window, time first; `bf16` one of BF16_WAYS, or None for fp32."""
    layer = library_layer(kind, size, place)
    dtype = torch.bfloat16 if bf16 == "weights" else torch.float32
    layer.to(dtype)
    product = torch.bfloat16 if bf16 == "autocast" else torch.float32
    x_TBD = window_input(size, place).detach().transpose(0, 1).contiguous().to(dtype).requires_grad_()
    state = window_state(size, place, num_parts=2 if kind == "lstm" else 1, dtype=dtype)

    def forward() -> tuple[Tensor, ...]:
        with place.autocast(product):
            return _run(layer, x_TBD, state)

    facts = size.facts() | {"kind": kind, "switches": [], "recurrence": "full"}
    facts |= {"products": "fp32" if bf16 is None else "bf16", "implementation": library_name(kind, bf16)}
    return Side(name, ForwardBackward(forward, [x_TBD, *state, *layer.parameters()]), size.tokens, facts)


def library_name(kind: str, bf16: str | None) -> str:
    """nn.LSTM or nn.GRU, and how it got to bf16."""
    way = {None: "", "autocast": " autocast", "weights": " .bfloat16()"}[bf16]
    return f"nn.{LAYERS[kind].__name__}{way}"


def _run(layer: nn.LSTM | nn.GRU, x: Any, state: State) -> tuple[Any, ...]:
    """Output and last state [B, D] of a layer given states [B, D]."""
    before = tuple(part.unsqueeze(0) for part in state)
    if isinstance(layer, nn.LSTM):
        y, last = layer(x, before)
        return y, *(part[0] for part in last)
    y, hidden_1BD = layer(x, before[0])
    return y, hidden_1BD[0]


class PackedDocuments:
    """A window cut where documents begin; every part a sequence of its own, padded and packed around nn.LSTM.

    Gives what resets give: outputs [B, T, D] in place and the last state of every row. A part that a row's window
    begins with goes on from the row's carried state.
    """

    def __init__(self, layer: nn.LSTM, reset_BT: Tensor) -> None:
        num_rows, num_steps = reset_BT.shape
        parts = [(row, start, stop) for row in range(num_rows) for start, stop in _parts(reset_BT[row].tolist())]
        self._layer = layer
        # The library sorts by length on the host.
        self._lengths_N = torch.tensor([stop - start for _, start, stop in parts])
        device = reset_BT.device
        longest = int(self._lengths_N.max())
        self._inside_NL = (torch.arange(longest) < self._lengths_N.unsqueeze(1)).to(device)
        self._row_N = torch.tensor([row for row, _, _ in parts], device=device)
        self._goes_on_N1 = torch.tensor(
            [[start == 0 and not bool(reset_BT[row, 0])] for row, start, _ in parts], device=device
        )
        self._last_part_B = torch.tensor(
            [index for index, (_, _, stop) in enumerate(parts) if stop == num_steps], device=device
        )

    def __call__(self, x_BTD: Tensor, state: State) -> tuple[Tensor, ...]:
        padded_NLD = x_BTD.new_zeros((*self._inside_NL.shape, x_BTD.shape[-1]))
        # Rows of the window and parts are in the same order, so one mask says where every position goes.
        padded_NLD[self._inside_NL] = x_BTD.flatten(0, 1)
        packed = pack_padded_sequence(padded_NLD, self._lengths_N, batch_first=True, enforce_sorted=False)
        before = tuple(part[self._row_N] * self._goes_on_N1 for part in state)
        y_packed, *last = _run(self._layer, packed, before)
        y_NLD, _ = pad_packed_sequence(y_packed, batch_first=True)
        return y_NLD[self._inside_NL].view_as(x_BTD), *(part[self._last_part_B] for part in last)


def packed_side(name: str, reset_BT: Tensor, *, size: Size, place: Place, dtype: torch.dtype) -> Side:
    """`PackedDocuments` with a layer whose weights are in `dtype`."""
    layer = library_layer("lstm", size, place, batch_first=True).to(dtype)
    assert isinstance(layer, nn.LSTM)
    documents = PackedDocuments(layer, reset_BT)
    x_BTD = window_input(size, place, dtype=dtype)
    state = window_state(size, place, num_parts=2, dtype=dtype)
    facts = size.facts() | {"kind": "lstm", "switches": [], "recurrence": "full", "products": short_name(dtype)}
    facts["implementation"] = "pad, pack, nn.LSTM" + ("" if dtype == torch.float32 else " .bfloat16()")
    leaves = [x_BTD, *state, *layer.parameters()]
    return Side(name, ForwardBackward(lambda: documents(x_BTD, state), leaves), size.tokens, facts)


def _parts(resets: list[bool]) -> list[tuple[int, int]]:
    """[start, stop) of a row's parts: one begins at 0 and where a document does."""
    starts = [0, *(t for t, is_reset in enumerate(resets) if is_reset and t > 0)]
    return list(zip(starts, [*starts[1:], len(resets)], strict=True))


class WordLanguageModel(nn.Module):
    """Embedding, nn.LSTM and a linear layer with one logit a word, as the usual tutorial language model has them.

    `tied` makes the output layer's weight the embedding's, and projects a hidden state of another width to its: the
    products of a model of ours whose embedding is narrower than its state.
    """

    def __init__(
        self, vocab_size: int, embedding_width: int, *, width: int, num_layers: int, tied: bool = False
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, embedding_width)
        self.lstm = nn.LSTM(embedding_width, width, num_layers)
        self.project = nn.Linear(width, embedding_width, bias=False) if tied and embedding_width != width else None
        self.to_words = nn.Linear(embedding_width if tied else width, vocab_size)
        if tied:
            self.to_words.weight = self.embed.weight

    def initial_state(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """Zeros, hidden and cell state [num_layers, B, D]."""
        weight = self.to_words.bias
        shape = (self.lstm.num_layers, num_rows, self.lstm.hidden_size)
        return weight.new_zeros(shape), weight.new_zeros(shape)

    def forward(self, tokens_TB: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Log probabilities of every next word [T * B, V] after tokens [T, B], and the state after the window."""
        hidden_TBD, state = self.lstm(self.embed(tokens_TB), state)
        if self.project is not None:
            hidden_TBD = self.project(hidden_TBD)
        return log_softmax(self.to_words(hidden_TBD).flatten(0, 1), dim=-1), state


class WordModelTraining:
    """Steps of a WordLanguageModel in fp32: full logits, clipping, plain gradient descent by hand, carried state."""

    def __init__(
        self, model: WordLanguageModel, batches: list[tuple[Tensor, Tensor]], *, lr: float, clip_norm: float
    ) -> None:
        self._model = model
        self._batches = batches
        self._lr, self._clip_norm = lr, clip_norm
        self._state = model.initial_state(batches[0][0].shape[1])
        self._num_steps = 0

    def __call__(self) -> None:
        tokens_TB, targets_TB = self._batches[self._num_steps % len(self._batches)]
        self._num_steps += 1
        self._model.zero_grad()
        log_probabilities_NV, state = self._model(tokens_TB, self._state)
        self._state = (state[0].detach(), state[1].detach())
        nll_loss(log_probabilities_NV, targets_TB.flatten()).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._model.parameters(), self._clip_norm)
        with torch.no_grad():
            for parameter in self._model.parameters():
                assert parameter.grad is not None
                parameter.add_(parameter.grad, alpha=-self._lr)
