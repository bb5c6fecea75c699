"""Matrix products of the recurrent kernels: which number format they run in, and one weight multiplied many times.

Legend: B rows, D width, N outputs, K inputs, G all gates side by side (a multiple of D).
"""

import torch
from torch import Tensor
from torch.nn.functional import linear as dense

from reprise.runtime import UserError

PRODUCT_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def product_dtype(weight: Tensor) -> torch.dtype:
    """The format matrix products run in: autocast's where it is on for the weight's device, else the weight's own.

    Everything else (gates, cell, norm, carried state) runs in `state_dtype` of it.
    """
    device = weight.device.type
    if weight.dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    if weight.dtype not in PRODUCT_DTYPES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in PRODUCT_DTYPES)
        raise UserError(f"recurrent weights are {weight.dtype}; allowed: {allowed}")
    return weight.dtype


def state_dtype(product: torch.dtype) -> torch.dtype:
    """fp32, or fp64 where the products are fp64 (gradient checks)."""
    return torch.promote_types(product, torch.float32)


def mixed_linear(x: Tensor, weight_NK: Tensor, product: torch.dtype) -> Tensor:
    """x[..., K] times weight[N, K] transposed, multiplied in `product`, returned in `state_dtype(product)`."""
    return dense(x.to(product), weight_NK.to(product)).to(state_dtype(product))


def recurrence_structure(recurrent_GK: Tensor, width: int) -> str:
    """Which units of the previous hidden state a gate's unit hears, by the second dimension of the recurrent weight.

    full: K = D, all of them. block: K divides D, the K units of its head, which is head d // K for unit d.
    diagonal: K = 1, itself. Raises UserError for any other K.
    """
    heard = recurrent_GK.shape[1]
    if heard == width:
        return "full"
    if heard == 1:
        return "diagonal"
    if heard == 0 or width % heard != 0:
        raise UserError(
            f"recurrent weight {list(recurrent_GK.shape)} with a state of {width} units: its second dimension is "
            f"{heard}; allowed: {width} (full), a divisor of {width} (block), 1 (diagonal)"
        )
    return "block"


class PackedWeight:
    """A weight [N, K] that multiplies the rows of one time step after another: laid out once, used T times.

    On CPU a plain product re-orders the weight inside every call: at 32 rows it then takes 1.2 (bf16) to 1.8 (fp32)
    times as long. Elsewhere a plain product is taken.
    """

    def __init__(self, weight_NK: Tensor, product: torch.dtype, *, num_rows: int) -> None:
        self._weight_NK = weight_NK.detach().to(product).contiguous()
        self._packed: Tensor | None = None
        if self._weight_NK.device.type == "cpu" and product in (torch.float32, torch.bfloat16) and _can_pack(product):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self._weight_NK, num_rows)

    def times(self, x_BK: Tensor) -> Tensor:
        """x[B, K] times the transposed weight: [B, N], in the product's format."""
        if self._packed is None:
            return torch.mm(x_BK, self._weight_NK.t())
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x_BK, self._packed, None, "none", [], "")
        return result


def _can_pack(product: torch.dtype) -> bool:
    """oneDNN is there, and has this format on this processor (bf16 needs AVX-512)."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return product == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
