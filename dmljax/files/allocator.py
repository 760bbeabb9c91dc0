"""How much freed memory a process keeps for its next allocations."""

import contextlib
import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -3, -4, -8


def keep_at_most(kept: int, *, large: int) -> None:
    """Gives back what is freed beyond `kept` bytes, and each freed block of `large` bytes or more.

    By itself glibc raises both limits to what was once allocated, and keeps memory for each thread.
    """
    with contextlib.suppress(OSError, AttributeError):  # other systems have another allocator
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_MMAP_THRESHOLD, large)
        libc.mallopt(_TRIM_THRESHOLD, kept)
        libc.mallopt(_ARENA_MAX, 1)


def keep_all() -> None:
    """Never gives back what is freed, so that the next step need not ask for it again."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_ARENA_MAX, 1)
        libc.mallopt(_MMAP_MAX, 0)
        libc.mallopt(_TRIM_THRESHOLD, -1)  # no limit; a number ends at 2 GiB


def trim() -> None:
    """Gives back all that is free, also between blocks that are in use."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
