"""Perplexity and bits per byte, counted exactly, and generation.

B rows, T time, V vocabulary.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor

from reprise.models import LanguageModel, ModelState
from reprise.runtime import UserError


class Tally:
    """Sum of negative log-likelihoods and the tokens behind it; one mean is taken, at the end, over all ranks."""

    def __init__(self, sums: Tensor | None = None) -> None:
        self._sums = torch.zeros(2, dtype=torch.float64) if sums is None else sums.clone()

    @property
    def sums(self) -> Tensor:
        """The two sums as plain data, to save and to start from again: [2] fp64, on the CPU."""
        return self._sums.detach().cpu().clone()

    def add(self, nll_sum: Tensor, num_tokens: int) -> None:
        """Count `num_tokens` predictions whose nats add up to `nll_sum`, on its device and without waiting for it."""
        self._sums = self._sums.to(nll_sum.device)
        self._sums[0] += nll_sum.double()
        self._sums[1] += num_tokens

    def reduce(self, device: torch.device) -> None:
        """Add up over all ranks; a collective, so every rank must call it."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self._sums = self._sums.to(device)
            torch.distributed.all_reduce(self._sums)

    @property
    def nll_sum(self) -> float:
        return float(self._sums[0])

    @property
    def num_tokens(self) -> int:
        return int(self._sums[1])

    @property
    def loss(self) -> float:
        """Nats per token; nan before any token."""
        return self.nll_sum / self.num_tokens if self.num_tokens else math.nan


def language_scores(prefix: str, tally: Tally, *, num_bytes: int, num_words: int | None) -> dict[str, float]:
    """The scores of a whole split under their fixed names.

    Args:
        prefix: "val" or "test".
        tally: over every token of the split, on all ranks.
        num_bytes: UTF-8 bytes of the split's text.
        num_words: words the corpus defines (PTB: `<eos>` counted), or None where it defines none.
    """
    scores = {
        f"{prefix}/loss": tally.loss,
        f"{prefix}/ppl": perplexity(tally.loss),
        f"{prefix}/bpb": tally.nll_sum / math.log(2) / num_bytes,
    }
    if num_words is not None:
        scores[f"{prefix}/ppl_word"] = perplexity(tally.nll_sum / num_words)
    return scores


def perplexity(loss: float) -> float:
    """exp of nats per token, inf where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf


@dataclass
class GenerateConfig:
    """How the next token is drawn. `temperature=0` takes the likeliest."""

    num_tokens: int = 200
    temperature: float = 0.8
    top_k: Optional[int] = None
    top_p: Optional[float] = 0.95

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise UserError(f"generate.num_tokens={self.num_tokens}: at least 1")
        if self.temperature < 0:
            raise UserError(f"generate.temperature={self.temperature}: at least 0")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"generate.top_k={self.top_k}: at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"generate.top_p={self.top_p}: more than 0, at most 1")


def choose_token(logits_V: Tensor, settings: GenerateConfig, generator: torch.Generator) -> int:
    """Draw one token from fp32 logits on the CPU; top-k first, then top-p (Holtzman et al. 2020) on what is left."""
    if settings.temperature == 0:
        return int(logits_V.argmax())
    logits_V = logits_V / settings.temperature
    if settings.top_k is not None and settings.top_k < logits_V.numel():
        threshold = logits_V.topk(settings.top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < threshold, -math.inf)
    probabilities_V = torch.softmax(logits_V, dim=-1)
    if settings.top_p is not None and settings.top_p < 1:
        sorted_V, order_V = probabilities_V.sort(descending=True, stable=True)
        # The token that crosses the threshold stays, so at least one always does.
        outside_V = sorted_V.cumsum(0) - sorted_V >= settings.top_p
        probabilities_V = probabilities_V.index_fill(0, order_V[outside_V], 0.0)
    return int(torch.multinomial(probabilities_V, 1, generator=generator))


@torch.inference_mode()
def generate(
    model: LanguageModel, prompt_ids: list[int], *, settings: GenerateConfig, eos_id: int, seed: int
) -> Iterator[int]:
    """Tokens that follow the prompt, one at a time, until `<eos>` or `settings.num_tokens`.

    Args:
        model: in evaluation mode.
        prompt_ids: may be empty; the text then begins as a document does, after `<eos>`.
        settings: temperature, top-k, top-p, length.
        eos_id: ends the text, and begins it.
        seed: the same seed, prompt and weights give the same text.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    state: ModelState = model.initial_state(1, device)
    tokens_BT = torch.tensor([[eos_id, *prompt_ids]], device=device)
    for _ in range(settings.num_tokens):
        hidden_BTD, state = model(tokens_BT, state)
        token = choose_token(model.logits(hidden_BTD[:, -1:])[0, 0].float().cpu(), settings, generator)
        if token == eos_id:
            return
        yield token
        tokens_BT = torch.tensor([[token]], device=device)
