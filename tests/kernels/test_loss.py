"""The chunked loss against all logits at once, and against torch's cross-entropy."""

from collections.abc import Callable

import pytest
import torch
from kernel_cases import BOUNDS, relative_rms
from torch import Tensor
from torch.nn.functional import cross_entropy

from reprise.kernels import cpu_loss, loss, native, reference

Kernel = Callable[..., Tensor]
# Every fast implementation that runs here.
KERNELS: list[Kernel] = [loss.linear_cross_entropy] + (
    [] if native.library() is None else [cpu_loss.linear_cross_entropy]
)


def _inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_ND = torch.randn(23, 8, generator=generator).to(dtype).requires_grad_()
    weight_VD = torch.randn(31, 8, generator=generator).to(dtype).requires_grad_()
    bias_V = torch.randn(31, generator=generator).to(dtype).requires_grad_()
    targets_N = torch.randint(31, (23,), generator=generator)
    targets_N[[3, 4, 22]] = reference.IGNORE
    return hidden_ND, weight_VD, bias_V, targets_N


@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.0), (0.0, 0.01), (0.1, 0.01)])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 23, None])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_every_chunk_size_equals_all_logits(
    dtype: torch.dtype, chunk_tokens: int | None, smoothing: float, z_loss: float
) -> None:
    hidden_ND, weight_VD, bias_V, targets_N = _inputs(dtype)
    leaves = (hidden_ND, weight_VD, bias_V)
    results = []
    kernels = [reference.linear_cross_entropy, loss.linear_cross_entropy]
    kernels += [] if dtype == torch.float64 else KERNELS[1:]
    for kernel in kernels:
        total = kernel(
            hidden_ND, weight_VD, bias_V, targets_N, chunk_tokens=chunk_tokens, label_smoothing=smoothing, z_loss=z_loss
        )
        gradients = torch.autograd.grad(3.0 * total, leaves)
        results.append((total.detach(), *gradients))
    for result in results[1:]:
        for value, expected in zip(result, results[0], strict=True):
            assert value.dtype == expected.dtype
            assert relative_rms(value, expected) <= BOUNDS[dtype]


def test_equals_torch_cross_entropy() -> None:
    hidden_ND, weight_VD, bias_V, targets_N = _inputs(torch.float64)
    logits_NV = hidden_ND @ weight_VD.t() + bias_V
    expected = cross_entropy(logits_NV, targets_N, ignore_index=-100, reduction="sum")
    torch.testing.assert_close(loss.linear_cross_entropy(hidden_ND, weight_VD, bias_V, targets_N), expected)


@pytest.mark.parametrize("kernel", KERNELS)
def test_autocast_keeps_softmax_and_sum_in_fp32(kernel: Kernel) -> None:
    hidden_ND, weight_VD, bias_V, targets_N = _inputs(torch.float32)
    expected = reference.linear_cross_entropy(hidden_ND, weight_VD, bias_V, targets_N)
    with torch.autocast("cpu", torch.bfloat16):
        total = kernel(hidden_ND, weight_VD, bias_V, targets_N, chunk_tokens=7)
    torch.autograd.backward(total)
    assert total.dtype == torch.float32
    assert weight_VD.grad is not None and weight_VD.grad.dtype == torch.float32
    assert relative_rms(total.detach(), expected.detach()) <= BOUNDS[torch.bfloat16]


@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_to_predict_costs_nothing(kernel: Kernel) -> None:
    hidden_ND, weight_VD, bias_V, targets_N = _inputs(torch.float32)
    total = kernel(hidden_ND, weight_VD, bias_V, torch.full_like(targets_N, reference.IGNORE))
    torch.autograd.backward(total)
    assert total.item() == 0.0
    assert hidden_ND.grad is not None and not hidden_ND.grad.any()


@pytest.mark.parametrize("kernel", KERNELS)
def test_without_gradients_gives_the_same_loss(kernel: Kernel) -> None:
    hidden_ND, weight_VD, bias_V, targets_N = _inputs(torch.float32)
    with torch.no_grad():
        value = kernel(hidden_ND, weight_VD, bias_V, targets_N, chunk_tokens=7)
    expected = kernel(hidden_ND, weight_VD, bias_V, targets_N, chunk_tokens=7)
    assert not value.requires_grad
    assert torch.equal(value, expected.detach())


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_hopeless_prediction_is_finite(kernel: Kernel) -> None:
    weight_VD = torch.tensor([[200.0], [-200.0]])
    total = kernel(torch.ones(1, 1), weight_VD, torch.zeros(2), torch.tensor([1]))
    assert total.item() == pytest.approx(400.0)


@pytest.mark.parametrize("target", [31, -1])
def test_a_target_outside_the_vocabulary_is_an_error(target: int) -> None:
    if native.library() is None:
        pytest.skip("no C++ compiler here")
    hidden_ND, weight_VD, bias_V, targets_N = _inputs(torch.float32)
    targets_N[5] = target
    with pytest.raises(IndexError, match=f"target {target}: the vocabulary has 31 words"):
        cpu_loss.linear_cross_entropy(hidden_ND, weight_VD, bias_V, targets_N)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_large_vocabulary_of_no_whole_vectors(dtype: torch.dtype) -> None:
    """A thousand words and a remainder, and rows that threads share unevenly."""
    generator = torch.Generator().manual_seed(3)
    hidden_ND = torch.randn(37, 16, generator=generator).to(dtype).requires_grad_()
    weight_VD = torch.randn(1003, 16, generator=generator).to(dtype).requires_grad_()
    bias_V = torch.randn(1003, generator=generator).to(dtype).requires_grad_()
    targets_N = torch.randint(1003, (37,), generator=generator)
    wide = [part.detach().double().requires_grad_() for part in (hidden_ND, weight_VD, bias_V)]
    expected = reference.linear_cross_entropy(*wide, targets_N)
    gradients = torch.autograd.grad(expected, wide)
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    for kernel in KERNELS:
        total = kernel(hidden_ND, weight_VD, bias_V, targets_N)
        assert relative_rms(total.detach(), expected.detach()) < min(bound, 1e-3)
        for value, wanted in zip(torch.autograd.grad(total, (hidden_ND, weight_VD, bias_V)), gradients, strict=True):
            assert relative_rms(value, wanted) < bound


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_word_ruled_out_by_its_bias_costs_nothing(kernel: Kernel) -> None:
    hidden_ND, weight_VD, bias_V, _ = _inputs(torch.float32)
    bias_V = bias_V.detach().clone()
    bias_V[1] = -torch.inf
    targets_N = torch.zeros(len(hidden_ND), dtype=torch.int64)
    expected = reference.linear_cross_entropy(hidden_ND, weight_VD, bias_V, targets_N)
    assert torch.allclose(kernel(hidden_ND, weight_VD, bias_V, targets_N), expected)


@pytest.mark.skipif(native.library() is None, reason="no C++ compiler here")
def test_targets_may_be_of_any_integer_format() -> None:
    hidden_ND, weight_VD, bias_V, targets_N = _inputs(torch.float32)
    expected = cpu_loss.linear_cross_entropy(hidden_ND, weight_VD, bias_V, targets_N)
    assert torch.equal(cpu_loss.linear_cross_entropy(hidden_ND, weight_VD, bias_V, targets_N.int()), expected)


@pytest.mark.skipif(native.library() is None, reason="no C++ compiler here")
def test_torch_compile_takes_the_loss_whole() -> None:
    """Of a size at which memory comes from what earlier windows left."""
    torch.manual_seed(0)
    leaves = [torch.randn(300, 8), torch.randn(2000, 8), torch.randn(2000)]
    hidden_ND, weight_VD, bias_V = (leaf.requires_grad_() for leaf in leaves)
    targets_N = torch.randint(2000, (300,))

    def kernel(hidden_ND: Tensor) -> Tensor:
        return cpu_loss.linear_cross_entropy(hidden_ND, weight_VD, bias_V, targets_N)

    results = []
    for function in (kernel, torch.compile(kernel, backend="aot_eager", fullgraph=True)):
        total = function(hidden_ND)
        results.append((total, *torch.autograd.grad(total, (hidden_ND, weight_VD, bias_V))))
    assert all(torch.equal(part, other) for part, other in zip(*results, strict=True))
