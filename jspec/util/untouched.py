"""Memory of zeros that a process does not hold before it is written."""

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable
from typing import Any

import jax

_DONT_NEED = 4  # MADV_DONTNEED of Linux: private pages are zeros again at their next use


def give_back_zeros(arrays: Any) -> None:
    """Give the memory of arrays of zeros back to the system until it is used.

    ``arrays`` is a pytree of zeros. They stay as they are. On other devices than CPUs and on other
    systems than Linux nothing happens.
    """
    advise = _madvise()
    for array in jax.tree.leaves(arrays):
        if advise is not None and all(device.platform == "cpu" for device in array.devices()):
            for shard in array.addressable_shards:
                begin = shard.data.unsafe_buffer_pointer()
                first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
                end = (begin + shard.data.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
                if end > first:
                    advise(first, end - first, _DONT_NEED)


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return madvise
