"""Memory of a window that is used again for the next one.

What a window keeps for its backward pass is tens of megabytes, made and freed in every step. An allocator gives such
pieces back to the system, which hands them out again page by page and zeroed: half as long as the forward pass itself.
"""

import ctypes
import math
import mmap
import weakref
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

# Below, allocators keep what is freed by themselves.
_SMALLEST_BYTES = 1 << 20


class WindowMemory:
    """Hands out tensors whose memory comes back by itself when the last tensor that shares it is gone."""

    def __init__(self) -> None:
        # Its operations are atomic: memory comes back at any time, from any thread.
        self._free: deque[mmap.mmap] = deque()

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A CPU tensor like one of `torch.empty`.

        Raises:
            OSError: no memory.
        """
        count = math.prod(shape)
        num_bytes = count * dtype.itemsize
        if num_bytes < _SMALLEST_BYTES:
            return torch.empty(tuple(shape), dtype=dtype)
        memory = self._take(num_bytes)
        lease = (ctypes.c_char * num_bytes).from_buffer(memory)
        # The tensor's storage owns the lease: views, and what autograd saved, keep it too.
        weakref.finalize(lease, self._free.append, memory).atexit = False
        return torch.frombuffer(lease, dtype=dtype, count=count).view(tuple(shape))

    def free_bytes(self) -> int:
        """Bytes that are held for the next window and used by nobody."""
        return sum(map(len, self._free))

    def _take(self, num_bytes: int) -> mmap.mmap:
        for memory in tuple(self._free):
            if len(memory) == num_bytes:
                try:
                    self._free.remove(memory)
                except ValueError:
                    # Another thread was faster.
                    continue
                return memory
        # Windows of other sizes than those before: what these left would lie idle for good.
        self._free.clear()
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return memory


MEMORY = WindowMemory()
