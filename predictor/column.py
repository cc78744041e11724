"""Long arrays that grow without being moved: their addresses are taken at once, their memory as it is touched.

To copy a hundred megabytes, or to have the system move them, takes tens of milliseconds. Where a system charges for
addresses, by a limit (RLIMIT_AS) or strict accounting (Linux's `vm.overcommit_memory=2`), an array is as long as it
must be, and is moved when it grows.
"""

from __future__ import annotations

import functools
import mmap
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[Any]

# More than any memory: who refuses so many addresses charges for them.
_NOBODY_HAS_BYTES = 1 << 42
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
if sys.platform == "linux":
    _FLAGS |= 0x4000  # MAP_NORESERVE, which Python's mmap has a name for since 3.13


def zeros(dtype: npt.DTypeLike, slots: int, room: int) -> Column:
    """So many zeros; or `room` of them, if that costs no memory."""
    if slots < room and _addresses_are_free():
        try:
            return np.frombuffer(_mapping(room * np.dtype(dtype).itemsize), dtype)
        except (OSError, ValueError, OverflowError):
            pass  # there are no more addresses in one piece
    return np.zeros(slots, dtype)


def longer(column: Column, slots: int, room: int) -> Column:
    """The same with zeros behind, up to so many slots at least. Nobody else may refer to the given one."""
    if len(column) >= slots:
        return column
    if column.flags.owndata:
        column.resize(slots, refcheck=False)
        return column
    moved = zeros(column.dtype, slots, room)
    moved[: len(column)] = column
    return moved


@functools.cache
def _addresses_are_free() -> bool:
    try:
        _mapping(_NOBODY_HAS_BYTES).close()
    except (OSError, ValueError, OverflowError):
        return False
    return True


def _mapping(length: int) -> mmap.mmap:
    return mmap.mmap(-1, length, _FLAGS)
