"""What all launches of Triton kernels share: whether they are possible, on which device, in what blocks.

With TRITON_INTERPRET=1 set before Triton is imported, the kernels run on a CPU, slowly: that is how they are tested
where there is no GPU.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

# The oldest GPUs that Triton compiles for.
_OLDEST_CAPABILITY = (7, 0)

# Units of a program, where it has the choice.
BLOCK_UNITS = 256
# Shared memory that a program may fill with what it loads ahead of its position: every GPU has as much ...
_BYTES_AHEAD = 48 << 10
# ... and numbers that it loads for a unit at a position: four gates and what the position read, and a gradient.
_NUMBERS_AHEAD = 6


@cache
def obstacle(device: str) -> str | None:
    """Why Triton kernels do not run on a device type, and the way out, in a few words; None where they do."""
    if find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if device != "cuda":
        return f"Triton has no code for {device}"
    if not any(map(shutil.which, [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"])):
        return "Triton needs a C compiler (gcc or clang, or CC)"
    if torch.version.hip is None and torch.cuda.get_device_capability() < _OLDEST_CAPABILITY:
        return f"Triton needs a GPU of compute capability {'.'.join(map(str, _OLDEST_CAPABILITY))} or more"
    return None


@contextmanager
def on_device_of(part: Tensor) -> Iterator[None]:
    """Without autocast, and with the tensor's GPU as the current one: Triton launches on that."""
    with torch.autocast(part.device.type, enabled=False):
        if part.is_cuda:
            with torch.cuda.device(part.device):
                yield
        else:
            yield


def power_of_two(number: int) -> int:
    """The smallest one that is not below `number`: blocks have such sizes."""
    return 1 << (number - 1).bit_length()


def num_warps(block: int) -> int:
    """Warps of a program on `block` units: four units a thread, between 1 warp and 16."""
    return min(max(block // 128, 1), 16)


def num_stages(block: int, kept: torch.dtype) -> int:
    """Positions that a launch over many of them has under way at once, their loads ahead of the arithmetic."""
    return 1 + min(2, _BYTES_AHEAD // (block * _NUMBERS_AHEAD * kept.itemsize))


@cache
def triton_dtype(dtype: torch.dtype) -> Any:
    """Triton's name for a kept format."""
    import triton.language as tl

    return {torch.float32: tl.float32, torch.float64: tl.float64}[dtype]
