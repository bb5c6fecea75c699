"""The output layer's loss on a CPU: `loss.py` with the softmax of a chunk in C++ (`csrc/loss.cpp`), fp32 and bf16.

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
    library = native.require()
    num_tokens, num_words = scores_CV.shape
    assert scores_CV.is_contiguous()
    is_wrong_C = (targets_C != IGNORE) & ((targets_C < 0) | (targets_C >= num_words))
    if is_wrong_C.any():
        raise IndexError(f"target {int(targets_C[is_wrong_C][0])}: the vocabulary has {num_words} words")
    bias_V, targets_C = bias_V.detach().float().contiguous(), targets_C.contiguous()
    loss_C = torch.empty(num_tokens)
    status = library.cross_entropy_chunk(
        ctypes.c_void_p(scores_CV.data_ptr()),
        ctypes.c_void_p(bias_V.data_ptr()),
        ctypes.c_void_p(targets_C.data_ptr()),
        ctypes.c_int64(num_tokens),
        ctypes.c_int64(num_words),
        ctypes.c_int64(IGNORE),
        ctypes.c_float(penalties.label_smoothing),
        ctypes.c_float(penalties.z_loss),
        ctypes.c_int(wants_gradient),
        ctypes.c_int(scores_CV.dtype == torch.bfloat16),
        ctypes.c_int64(torch.get_num_threads()),
        ctypes.c_void_p(loss_C.data_ptr()),
    )
    if status != 0:
        raise MemoryError(f"no memory for the scores of {num_words} words")
    return loss_C, scores_CV


linear_cross_entropy = partial(loss.linear_cross_entropy, chunk_loss=chunk_loss, empty=MEMORY.empty)
