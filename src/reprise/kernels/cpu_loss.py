"""The output layer's loss on a CPU: `loss.py` with the softmax of a chunk in C++ (`csrc/loss.cpp`), fp32 and bf16.

The visit of a chunk is a custom operator, so that torch.compile takes the loss whole.

Legend: N tokens, C tokens of a chunk, D width, V vocabulary.
"""

import ctypes
from functools import partial

import torch
from torch import Tensor

from reprise.kernels import loss, native
from reprise.kernels.loss import Penalties
from reprise.kernels.reference import IGNORE
from reprise.kernels.window_memory import MEMORY


def chunk_loss(
    scores_CV: Tensor, bias_V: Tensor, targets_C: Tensor, penalties: Penalties, wants_gradient: bool
) -> tuple[Tensor, Tensor]:
    """As `loss.chunk_loss`, the gradient in the place of the scores.

    Raises UserError where the scores are neither fp32 nor bf16, IndexError for a target outside the vocabulary.
    """
    native.check_format(scores_CV.dtype)
    loss_C = torch.ops.reprise.cross_entropy_chunk(
        scores_CV, bias_V, targets_C, penalties.label_smoothing, penalties.z_loss, wants_gradient
    )
    return loss_C, scores_CV


@torch.library.custom_op("reprise::cross_entropy_chunk", mutates_args=("scores_CV",), device_types="cpu")
def _cross_entropy_chunk(
    scores_CV: Tensor, bias_V: Tensor, targets_C: Tensor, label_smoothing: float, z_loss: float, wants_gradient: bool
) -> Tensor:
    """Losses [C] in fp32; the scores, fp32 or bf16, become their gradient where that is wanted."""
    num_tokens, num_words = scores_CV.shape
    assert scores_CV.is_contiguous() and bias_V.shape == (num_words,) and targets_C.shape == (num_tokens,)
    is_wrong_C = (targets_C != IGNORE) & ((targets_C < 0) | (targets_C >= num_words))
    if is_wrong_C.any():
        raise IndexError(f"target {int(targets_C[is_wrong_C][0])}: the vocabulary has {num_words} words")
    bias_V, targets_C = bias_V.detach().float().contiguous(), targets_C.to(torch.int64).contiguous()
    loss_C = torch.empty(num_tokens)
    status = native.require().cross_entropy_chunk(
        ctypes.c_void_p(scores_CV.data_ptr()),
        ctypes.c_void_p(bias_V.data_ptr()),
        ctypes.c_void_p(targets_C.data_ptr()),
        ctypes.c_int64(num_tokens),
        ctypes.c_int64(num_words),
        ctypes.c_int64(IGNORE),
        ctypes.c_float(label_smoothing),
        ctypes.c_float(z_loss),
        ctypes.c_int(wants_gradient),
        ctypes.c_int(scores_CV.dtype == torch.bfloat16),
        ctypes.c_int64(torch.get_num_threads()),
        ctypes.c_void_p(loss_C.data_ptr()),
    )
    if status != 0:
        raise MemoryError(f"no memory for the scores of {num_words} words")
    return loss_C


@_cross_entropy_chunk.register_fake
def _(scores_CV: Tensor, *_: object) -> Tensor:
    return scores_CV.new_empty(scores_CV.shape[:1], dtype=torch.float32)


def _empty(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    # What torch.compile traces has memory of its own choice.
    return torch.empty(shape, dtype=dtype) if torch.compiler.is_compiling() else MEMORY.empty(shape, dtype)


linear_cross_entropy = partial(loss.linear_cross_entropy, chunk_loss=chunk_loss, empty=_empty)
