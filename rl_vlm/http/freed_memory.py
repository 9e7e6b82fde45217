"""Makes glibc return freed image buffers to the system."""

from __future__ import annotations

import ctypes

_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
_LARGE = 1 << 20  # bytes


def return_freed_memory() -> None:
    """Allocate blocks of a MiB and more with mmap, so that `free` returns them. Holds for the whole process; needs glibc.

    By default glibc raises this threshold to 32 MiB. Pixels then lie in the heaps of the decoding threads between small blocks
    that stay, and the process keeps their memory (4.6 GiB after 128 images of 8 megapixels on four threads).
    """
    try:
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE)
    except (AttributeError, OSError):  # another C library
        return
