"""How the C library's allocator is told to treat the large buffers that bodies and prompts come and go with."""

from __future__ import annotations

import contextlib
import ctypes

_M_MMAP_THRESHOLD = -3  # of mallopt(3)
_LARGE_BYTES = 256 << 10


def give_back_large_buffers() -> None:
    """Memory of freed buffers of 256 KB or more goes back to the system at once.

    glibc does that by itself only until the first such buffer is freed. From then on it cuts them out of its heaps,
    where whatever small outlives them keeps them resident: with sixteen bodies of 3 MB at a time, a filter was 60 to
    100 MB larger. Another C library may not know the call, and is left as it is.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
