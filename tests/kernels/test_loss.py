"""The chunked loss against all logits at once, and against torch's cross-entropy."""

import pytest
import torch
from kernel_cases import BOUNDS, relative_rms
from torch import Tensor
from torch.nn.functional import cross_entropy

from reprise.kernels import loss, reference


def _inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_ND = torch.randn(23, 8, generator=generator).to(dtype).requires_grad_()
    weight_VD = torch.randn(31, 8, generator=generator).to(dtype).requires_grad_()
    bias_V = torch.randn(31, generator=generator).to(dtype).requires_grad_()
    targets_N = torch.randint(31, (23,), generator=generator)
    targets_N[[3, 4, 22]] = reference.IGNORE
    return hidden_ND, weight_VD, bias_V, targets_N


@pytest.mark.parametrize("chunk_tokens", [1, 7, 23, None])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_every_chunk_size_equals_all_logits(dtype: torch.dtype, chunk_tokens: int | None) -> None:
    hidden_ND, weight_VD, bias_V, targets_N = _inputs(dtype)
    leaves = (hidden_ND, weight_VD, bias_V)
    results = []
    for kernel in (loss.linear_cross_entropy, reference.linear_cross_entropy):
        total = kernel(hidden_ND, weight_VD, bias_V, targets_N, chunk_tokens=chunk_tokens)
        gradients = torch.autograd.grad(3.0 * total, leaves)
        results.append((total.detach(), *gradients))
    for value, expected in zip(*results, strict=True):
        assert value.dtype == expected.dtype
        assert relative_rms(value, expected) <= BOUNDS[dtype]


def test_equals_torch_cross_entropy() -> None:
    hidden_ND, weight_VD, bias_V, targets_N = _inputs(torch.float64)
    logits_NV = hidden_ND @ weight_VD.t() + bias_V
    expected = cross_entropy(logits_NV, targets_N, ignore_index=-100, reduction="sum")
    torch.testing.assert_close(loss.linear_cross_entropy(hidden_ND, weight_VD, bias_V, targets_N), expected)


def test_autocast_keeps_softmax_and_sum_in_fp32() -> None:
    hidden_ND, weight_VD, bias_V, targets_N = _inputs(torch.float32)
    expected = reference.linear_cross_entropy(hidden_ND, weight_VD, bias_V, targets_N)
    with torch.autocast("cpu", torch.bfloat16):
        total = loss.linear_cross_entropy(hidden_ND, weight_VD, bias_V, targets_N, chunk_tokens=7)
    torch.autograd.backward(total)
    assert total.dtype == torch.float32
    assert weight_VD.grad is not None and weight_VD.grad.dtype == torch.float32
    assert relative_rms(total.detach(), expected.detach()) <= BOUNDS[torch.bfloat16]


def test_nothing_to_predict_costs_nothing() -> None:
    hidden_ND, weight_VD, bias_V, targets_N = _inputs(torch.float32)
    total = loss.linear_cross_entropy(hidden_ND, weight_VD, bias_V, torch.full_like(targets_N, reference.IGNORE))
    torch.autograd.backward(total)
    assert total.item() == 0.0
    assert hidden_ND.grad is not None and not hidden_ND.grad.any()


def test_without_gradients_gives_the_same_loss() -> None:
    hidden_ND, weight_VD, bias_V, targets_N = _inputs(torch.float32)
    with torch.no_grad():
        value = loss.linear_cross_entropy(hidden_ND, weight_VD, bias_V, targets_N, chunk_tokens=7)
    expected = loss.linear_cross_entropy(hidden_ND, weight_VD, bias_V, targets_N, chunk_tokens=7)
    assert not value.requires_grad
    assert torch.equal(value, expected.detach())


def test_a_hopeless_prediction_is_finite() -> None:
    weight_VD = torch.tensor([[200.0], [-200.0]])
    total = loss.linear_cross_entropy(torch.ones(1, 1), weight_VD, torch.zeros(2), torch.tensor([1]))
    assert total.item() == pytest.approx(400.0)
