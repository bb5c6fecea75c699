"""What a benchmark ran on: the device, the processor's features, the threads, and the limit that it has measured."""

import platform
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from reprise.benchmarks.timing import Side
from reprise.distributed.membership import ClusterConfig
from reprise.kernels.products import PackedWeight
from reprise.runtime import available_cores

# What decides which code runs, of the many flags a processor has.
_TOLD_FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_fp16", "bf16", "sve")
# Rows, inputs, outputs: square, and long and narrow as the products of a whole window are.
_PRODUCT_SHAPES = ((1024, 1024, 1024), (2048, 2048, 2048), (4096, 512, 1536), (4096, 512, 8192))
# The same on a GPU, where a product must be larger to count as large.
_GPU_SCALE = 4


@dataclass(frozen=True)
class Place:
    """A device to measure on."""

    device: torch.device

    @classmethod
    def of(cls, cluster: ClusterConfig) -> "Place":
        """The device on which training runs under these settings."""
        return cls(torch.device("cuda" if cluster.accelerator == "gpu" else "cpu"))

    def synchronise(self) -> None:
        """Wait for what the device has been told to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def autocast(self, product: torch.dtype) -> AbstractContextManager[Any]:
        """Matrix products in `product` with fp32 parameters, as training has them."""
        return torch.autocast(self.device.type, dtype=product, enabled=product != torch.float32)

    def facts(self) -> dict[str, Any]:
        """The machine, as `result.json` names it."""
        return {
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu",
            "processor": _processor_name(),
            "processor_features": _processor_features(),
            "cores": available_cores(),
            "threads": torch.get_num_threads(),
            "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        }


def short_name(dtype: torch.dtype) -> str:
    """bf16, fp16, fp32, fp64."""
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}[dtype]


def product_sides(product: torch.dtype, place: Place) -> list[Side]:
    """x times a transposed weight as a linear layer takes it, plain and with the weight laid out beforehand."""
    scale = _GPU_SCALE if place.device.type == "cuda" else 1
    sides = []
    for num_rows, num_inputs, num_outputs in _PRODUCT_SHAPES:
        shape = (num_rows * scale, num_inputs * scale, num_outputs * scale)
        x = torch.randn(shape[0], shape[1], device=place.device).to(product)
        weight = torch.randn(shape[2], shape[1], device=place.device).to(product)
        name = "x".join(map(str, shape))
        facts = {"products": short_name(product), "flops": 2 * shape[0] * shape[1] * shape[2]}
        plain = partial(torch.mm, x, weight.t())
        sides.append(Side(f"product_{name}", plain, facts=facts | {"is_packed": False}))
        if place.device.type == "cpu":
            packed = partial(PackedWeight(weight, product, num_rows=shape[0]).times, x)
            sides.append(Side(f"packed_product_{name}", packed, facts=facts | {"is_packed": True}))
    return sides


def _processor_field(*names: str) -> str:
    """The first of these fields in Linux's list of processors; empty elsewhere."""
    file = Path("/proc/cpuinfo")
    if not file.exists():
        return ""
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in names:
            return value.strip()
    return ""


def _processor_name() -> str:
    return _processor_field("model name") or platform.processor() or platform.machine()


def _processor_features() -> list[str]:
    present = set(_processor_field("flags", "Features").split())
    return [feature for feature in _TOLD_FEATURES if feature in present]
