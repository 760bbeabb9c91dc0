"""Cores and memory that this process may use, and freed memory that it keeps.

Containers and batch jobs limit a process by its control groups. See
https://docs.kernel.org/admin-guide/cgroup-v2.html and, for version 1, cgroup-v1/ there.
"""

import contextlib
import ctypes
import math
import os
import pathlib
from collections.abc import Iterator

_ROOT = pathlib.Path("/")
# Files of control groups, of version 2 and of version 1: the limit, and the used bytes.
_MEMORY_FILES = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -3, -4, -8  # of mallopt


def core_count(root: pathlib.Path = _ROOT) -> int:
    """Returns the number of cores that this process may use; the machine may have more.

    `taskset` and schedulers give a process some of the cores. The CPU limit of a container is a
    fraction of the time of all cores: a limit of 1.5 counts as two cores.
    """
    return min([_scheduler_cores(), *_group_cores(root)])


def _scheduler_cores() -> int:
    if hasattr(os, "process_cpu_count"):  # Python 3.13
        return os.process_cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _group_cores(root: pathlib.Path) -> list[int]:
    """Returns the limit of every control group that limits the cores of this process."""
    counts = []
    for folder in _groups("cpu", root):
        words = " ".join(_lines(folder / "cpu.max")).split()  # version 2
        if not words:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            words = [line for name in names for line in _lines(folder / name)]
        if len(words) == 2 and all(word.isdigit() for word in words):  # not "max", nor -1
            quota, period = map(int, words)
            counts.append(max(1, math.ceil(quota / period)))
    return counts


def free_memory(root: pathlib.Path = _ROOT) -> int:
    """Returns the free bytes of the machine, within the limits of a container or a batch job.

    Memory with copies of files counts as free: the system takes it back when it is needed.
    """
    return min([_machine_memory(root), *_group_memory(root)])


def _machine_memory(root: pathlib.Path) -> int:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _group_memory(root: pathlib.Path) -> list[int]:
    """Returns the remaining bytes of every control group that limits the memory."""
    remaining = []
    for folder in _groups("memory", root):
        for limit_file, used_file in _MEMORY_FILES:
            limit, used = _lines(folder / limit_file), _lines(folder / used_file)
            if used and limit and limit[0].isdigit():
                values = dict(line.split() for line in _lines(folder / "memory.stat"))
                files = values.get("total_inactive_file", values.get("inactive_file", 0))
                remaining.append(max(0, int(limit[0]) - int(used[0]) + int(files)))
    return remaining


def _groups(controller: str, root: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields the folders of the groups of this process, and of their parents.

    `controller` is "memory" or "cpu". In a container, the folders show its own group as the topmost
    one.
    """
    for line in _lines(root / "proc/self/cgroup"):
        kinds, path = line.split(":", 2)[1:]
        for kind in {"", controller}.intersection(kinds.split(",")):
            names = pathlib.PurePosixPath(path.lstrip("/"))
            for group in [names, *names.parents]:
                yield root / "sys/fs/cgroup" / kind / group


def _lines(path: pathlib.Path) -> list[str]:
    """Returns the lines of a file of the system; none if it cannot be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def limit_freed_memory(kept: int, *, large: int) -> None:
    """Returns freed memory beyond `kept` bytes, and freed blocks of at least `large` bytes.

    By default glibc raises both limits to sizes that were allocated, and keeps memory per thread.
    """
    with contextlib.suppress(OSError, AttributeError):  # other systems have another allocator
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_MMAP_THRESHOLD, large)
        libc.mallopt(_TRIM_THRESHOLD, kept)
        libc.mallopt(_ARENA_MAX, 1)


def keep_freed_memory() -> None:
    """Keeps all freed memory, so that the next step need not request it again."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_ARENA_MAX, 1)
        libc.mallopt(_MMAP_MAX, 0)
        libc.mallopt(_TRIM_THRESHOLD, -1)  # no limit; a number ends at 2 GiB


def trim_memory() -> None:
    """Returns all free memory to the system, also between blocks that are in use."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
