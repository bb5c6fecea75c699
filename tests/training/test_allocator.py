"""What a step frees stays with the process; each case is a process of its own, since this cannot be taken back."""

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")

_SCRIPT = """
import resource
from reprise.training.allocator import keep_freed_memory

print(keep_freed_memory())
for _ in range(6):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    parts = [bytearray(20 << 20) for _ in range(3)]
    del parts
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _run(**environment: str) -> list[str]:
    said = subprocess.run(
        [sys.executable, "-c", _SCRIPT], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    return said.stdout.split()


def test_freed_memory_is_used_again() -> None:
    taken, faults = _run()
    assert taken == "True"
    # 60 MiB are 15,360 pages, or 30 large ones.
    assert int(faults) < 10


def test_settings_of_the_environment_come_first() -> None:
    taken, _ = _run(MALLOC_TRIM_THRESHOLD_="131072")
    assert taken == "False"
