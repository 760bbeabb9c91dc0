"""The cores of this process."""

from __future__ import annotations

import os


def count() -> int:
    """How many cores this process may use; a machine, its scheduler or `taskset` may have more."""
    if hasattr(os, "process_cpu_count"):  # Python 3.13
        return os.process_cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
