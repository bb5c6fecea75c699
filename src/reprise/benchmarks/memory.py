"""Peak memory of one call in a process of its own: what it takes on top of what is there before.

The process runs `python -m reprise.benchmarks.memory <module> <function> <arguments> <warm-up arguments>`, arguments as
JSON, and prints a line of JSON.
"""

import gc
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
# Written there, it sets the process's peak of resident memory back to what is resident now (man 5 proc).
_RESET_PEAK = "5"


@dataclass(frozen=True)
class Growth:
    """Bytes at the peak of a call beyond those before it, and how they were counted."""

    peak_bytes: int
    how: str


def is_measurable(device: str) -> bool:
    """Whether this system says how much memory a process takes; a GPU's allocator always does."""
    return device == "cuda" or _CLEAR.exists()


def measure_growth(module: str, function: str, *, arguments: Sequence[Any], warmup_arguments: Sequence[Any]) -> Growth:
    """Growth of one call of the work that `module.function(*arguments)` makes ready.

    A small work, of `warmup_arguments`, is done before it: what is loaded and compiled once is no growth.

    Raises:
        RuntimeError: the process failed; with the end of what it said.
    """
    words = [module, function, json.dumps(list(arguments)), json.dumps(list(warmup_arguments))]
    command = [sys.executable, "-m", "reprise.benchmarks.memory", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return Growth(**answer)


def growth_here(work: Callable[[], Any]) -> Growth:
    """Run `work` and tell how far memory grew beyond what was taken before: the GPU's if there is one in use."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        return Growth(torch.cuda.max_memory_allocated() - before, "allocated on the GPU")
    gc.collect()
    _CLEAR.write_text(_RESET_PEAK, encoding="ascii")
    before = _resident("VmRSS")
    work()
    return Growth(_resident("VmHWM") - before, "resident, one process a case")


def _resident(field: str) -> int:
    """A field of the process's status in bytes: VmRSS is resident now, VmHWM its peak since the last reset."""
    found = re.search(rf"^{field}:\s+(\d+) kB", _STATUS.read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None, f"{_STATUS} has no {field}"
    return int(found[1]) * 1024


def main() -> None:
    """What the process of a case does: prepare and run the small work, then measure the one asked for."""
    module, function, arguments, warmup_arguments = sys.argv[1:]
    prepare = getattr(importlib.import_module(module), function)
    prepare(*json.loads(warmup_arguments))()
    print(json.dumps(asdict(growth_here(prepare(*json.loads(arguments))))))


if __name__ == "__main__":
    main()
