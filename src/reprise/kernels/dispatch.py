"""Which implementation of a kernel runs: picked by name, said once, refused by name, never silently exchanged."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from reprise.kernels import eager, library, loss, reference
from reprise.runtime import UserError, say

Kernel = Callable[..., Any]

KERNELS: dict[str, dict[str, Kernel]] = {
    "lstm": {"library": library.lstm, "eager": eager.lstm, "reference": reference.lstm},
    "gru": {"library": library.gru, "eager": eager.gru, "reference": reference.gru},
    "linear_cross_entropy": {"eager": loss.linear_cross_entropy, "reference": reference.linear_cross_entropy},
}
IMPLEMENTATIONS = ("auto", "library", "eager", "reference")


@cache
def pick(name: str, device: str, dtype: torch.dtype, implementation: str, *, switches: tuple[str, ...] = ()) -> Kernel:
    """The kernel `name` for a device type and a product format. Says what it picked the first time it is asked.

    `switches` are the options that are on and that only our own implementations have. `auto` is the library's where no
    switch is on and it has the kernel, else eager. Raises UserError for an unknown name or implementation, and for an
    implementation that lacks the kernel or the switches.
    """
    if name not in KERNELS:
        raise UserError(f"kernel={name}: unknown; allowed: {', '.join(KERNELS)}")
    if implementation not in IMPLEMENTATIONS:
        raise UserError(f"implementation={implementation}: unknown; allowed: {', '.join(IMPLEMENTATIONS)}")
    available = KERNELS[name]
    chosen = implementation
    if implementation == "auto":
        chosen = "library" if "library" in available and not switches else "eager"
    if chosen not in available:
        raise UserError(f"implementation={chosen}: has no {name}; allowed: auto, {', '.join(available)}")
    if chosen == "library" and switches:
        raise UserError(
            f"implementation=library: the library's {name} has no {', '.join(switches)}; "
            "allowed: auto, eager, reference"
        )
    asked = " (auto)" if implementation == "auto" else ""
    option_text = f" with {', '.join(switches)}" if switches else ""
    say(f"kernel {name}{option_text}: {chosen}{asked} on {device}, products in {str(dtype).removeprefix('torch.')}")
    return available[chosen]
