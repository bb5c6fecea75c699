"""Output layer and cross-entropy in one, over chunks of tokens: the logits of a window are never all in memory.

The gradients of the sum are computed in the forward pass, while a chunk's probabilities are at hand, and only scaled in
backward: the product that makes the logits is done once (the idea of Liger-Kernel's fused linear cross-entropy, Hsu et
al. 2024, arXiv:2410.10989, section 3).

Legend: N tokens, C tokens of a chunk, D width, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from reprise.kernels.products import product_dtype, state_dtype
from reprise.kernels.reference import IGNORE

# Logits of one chunk, in elements: a fraction of a CPU's last cache, or enough to keep a GPU busy.
_CPU_CHUNK_ELEMENTS = 1 << 22
_GPU_CHUNK_ELEMENTS = 1 << 26
_MIN_CHUNK_TOKENS = 256


# The losses [C] of one chunk from its scores [C, V] without bias, which become their gradient where that is wanted.
ChunkLoss = Callable[[Tensor, Tensor, Tensor, "Penalties", bool], tuple[Tensor, Tensor]]
# A tensor of a shape and a format, on the device of the loss, with anything in it.
Empty = Callable[[tuple[int, int], torch.dtype], Tensor]


@dataclass(frozen=True)
class Penalties:
    """Switches of the loss: both are off at zero. See `reference.linear_cross_entropy`."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0


def chunk_loss(
    scores_CV: Tensor, bias_V: Tensor, targets_C: Tensor, penalties: Penalties, wants_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Losses [C] and the gradient [C, V] of their sum by the scores, in the scores' format (any, if not wanted)."""
    kept = state_dtype(scores_CV.dtype)
    valid_C = targets_C != IGNORE
    targets_C1 = targets_C.masked_fill(~valid_C, 0).unsqueeze(1)
    kept_CV = scores_CV.to(kept) + bias_V.to(kept)
    smoothing, z_loss = penalties.label_smoothing, penalties.z_loss
    target_C = kept_CV.gather(1, targets_C1)[:, 0]
    # Not where it would count nothing: a word that a bias of -inf rules out makes it infinite.
    mean_C = kept_CV.mean(dim=1) if smoothing > 0.0 else torch.zeros_like(target_C)
    largest_C = kept_CV.amax(dim=1)
    torch.softmax(kept_CV, dim=-1, out=kept_CV)
    # log sum exp from the likeliest word, whose probability cannot underflow as the target's can.
    log_sum_C = largest_C - kept_CV.amax(dim=1).log_()
    loss_C = log_sum_C - (1.0 - smoothing) * target_C - smoothing * mean_C + z_loss * log_sum_C.square()
    loss_C = loss_C.masked_fill(~valid_C, 0.0)
    if not wants_gradient:
        return loss_C, scores_CV
    # By the scores: probabilities, less one at the target; and nothing for an ignored token.
    if z_loss > 0.0:
        kept_CV *= (1.0 + 2.0 * z_loss * log_sum_C).unsqueeze(1)
    kept_CV.scatter_add_(1, targets_C1, torch.full_like(targets_C1, -1, dtype=kept).mul_(1.0 - smoothing))
    if smoothing > 0.0:
        kept_CV -= smoothing / kept_CV.shape[1]
    if not valid_C.all():
        kept_CV *= valid_C.unsqueeze(1)
    return loss_C, kept_CV.to(scores_CV.dtype)


def linear_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor,
    targets_N: Tensor,
    *,
    chunk_tokens: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk_loss: ChunkLoss = chunk_loss,
    empty: Empty | None = None,
) -> Tensor:
    """Summed negative log-likelihood of `targets` under softmax(weight hidden + bias): a scalar, fp32 or fp64.

    Targets equal to IGNORE count nothing. Products run in the weight's format or autocast's, softmax and sums in fp32.
    The scores of a chunk lie in what `empty` makes: PyTorch's allocator, if nothing else is named.
    """
    product = product_dtype(weight_VD)
    if chunk_tokens is None:
        budget = _CPU_CHUNK_ELEMENTS if hidden_ND.device.type == "cpu" else _GPU_CHUNK_ELEMENTS
        chunk_tokens = max(_MIN_CHUNK_TOKENS, budget // weight_VD.shape[0])
    with torch.autocast(hidden_ND.device.type, enabled=False):
        total: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
            hidden_ND,
            weight_VD,
            bias_V,
            targets_N,
            chunk_loss,
            empty or partial(_empty, device=hidden_ND.device),
            Penalties(label_smoothing, z_loss),
            chunk_tokens,
            product,
            torch.is_grad_enabled(),
        )
    return total


def _empty(shape: tuple[int, int], dtype: torch.dtype, *, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor,
        targets_N: Tensor,
        chunk_loss: ChunkLoss,
        empty: Empty,
        penalties: Penalties,
        chunk_tokens: int,
        product: torch.dtype,
        wants_gradients: bool,
    ) -> Tensor:
        """The loss summed over tokens, in nats: a scalar in fp32, or fp64 where `product` is.

        hidden [N, D], weight [V, D], bias [V], targets [N] int64; products of `chunk_tokens` tokens at once in the
        format `product`. The gradients that backward will scale are made here, weight's and bias's in the kept format.
        """
        kept = state_dtype(product)
        read_ND, read_VD = hidden_ND.to(product), weight_VD.to(product)
        total = torch.zeros((), dtype=kept, device=hidden_ND.device)
        grad_hidden_ND = torch.empty_like(hidden_ND) if wants_gradients else None
        fresh = torch.empty_like if len(hidden_ND) else torch.zeros_like
        grad_weight_VD = fresh(weight_VD, dtype=kept) if wants_gradients else None
        grad_bias_V = fresh(bias_V, dtype=kept) if wants_gradients else None
        # One buffer for all chunks: fresh memory of this size costs more in page faults than the arithmetic on it.
        room_CV = empty((min(chunk_tokens, hidden_ND.shape[0]), weight_VD.shape[0]), product)
        for start in range(0, hidden_ND.shape[0], chunk_tokens):
            read_CD, targets_C = read_ND[start : start + chunk_tokens], targets_N[start : start + chunk_tokens]
            scores_CV = torch.mm(read_CD, read_VD.t(), out=room_CV[: len(read_CD)])
            loss_C, grad_CV = chunk_loss(scores_CV, bias_V, targets_C, penalties, wants_gradients)
            total += loss_C.sum()
            if grad_hidden_ND is None or grad_weight_VD is None or grad_bias_V is None:
                continue
            grad_hidden_ND[start : start + chunk_tokens] = torch.mm(grad_CV, read_VD)
            # The first chunk's is written, not added to zeros: two visits less of what is as large as the weight.
            add = Tensor.copy_ if start == 0 else Tensor.add_
            add(grad_bias_V, torch.mm(grad_CV.new_ones(1, len(grad_CV)), grad_CV)[0])
            add(grad_weight_VD, torch.mm(grad_CV.t(), read_CD))
        ctx.save_for_backward(grad_hidden_ND, grad_weight_VD, grad_bias_V)
        ctx.dtypes = (weight_VD.dtype, bias_V.dtype)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Any, ...]:
        """What forward made, times the gradient of the loss (a scalar), in the inputs' own shapes and formats."""
        grad_hidden_ND, grad_weight_VD, grad_bias_V = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        return (
            grad_hidden_ND * grad_total.to(grad_hidden_ND.dtype),
            (grad_weight_VD * grad_total).to(weight_dtype),
            (grad_bias_V * grad_total).to(bias_dtype),
            *(None,) * 7,
        )
