"""Cores and memory that this process may use, and freed memory that it keeps.

Containers and batch jobs limit a process by its control groups, of version 2:
https://docs.kernel.org/admin-guide/cgroup-v2.html
"""

import contextlib
import ctypes
import math
import os
import pathlib
from collections.abc import Iterator

_ROOT = pathlib.Path("/")
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -3, -4, -8  # of mallopt


def core_count(root: pathlib.Path = _ROOT) -> int:
    """Returns the number of cores that this process may use; the machine may have more.

    `taskset` and schedulers give a process some of the cores. The CPU limit of a container is a
    fraction of the time of all cores: a limit of 1.5 counts as two cores.
    """
    counts = [_scheduler_cores()]
    for group in _groups(root):
        quota, *period = _text(group / "cpu.max").split() or ["max"]
        if quota != "max":
            counts.append(max(1, math.ceil(int(quota) / int(period[0]))))
    return min(counts)


def _scheduler_cores() -> int:
    has_affinity = hasattr(os, "sched_getaffinity")  # Linux
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


def free_memory(root: pathlib.Path = _ROOT) -> int:
    """Returns the free bytes of the machine, within the limits of a container or a batch job.

    Memory with copies of files counts as free: the system takes it back when it is needed.
    """
    machine = _table(root / "proc/meminfo").get("MemAvailable:")
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    remaining = [pages if machine is None else machine << 10]
    for group in _groups(root):
        limit, used = (_text(group / f"memory.{name}").strip() for name in ("max", "current"))
        if limit.isdigit() and used:
            files = _table(group / "memory.stat").get("inactive_file", 0)
            remaining.append(max(0, int(limit) - int(used) + files))
    return min(remaining)


def _groups(root: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields the folders of the control group of this process and of its parents.

    In a container, the folders show its own group as the topmost one.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        if line.startswith("0::/"):
            group = pathlib.PurePosixPath(line.removeprefix("0::/"))
            yield from (root / "sys/fs/cgroup" / name for name in (group, *group.parents))


def _table(path: pathlib.Path) -> dict[str, int]:
    """Reads the first two words of every line, a name and a number."""
    rows = (line.split()[:2] for line in _text(path).splitlines())
    return {name: int(number) for name, number in rows}


def _text(path: pathlib.Path) -> str:
    """Returns the text of a file of the system; none if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _set_allocator(*options: tuple[int, int]) -> None:
    with contextlib.suppress(OSError, AttributeError):  # other systems have another allocator
        libc = ctypes.CDLL("libc.so.6")
        for option, value in options:
            libc.mallopt(option, value)


def limit_freed_memory(kept: int, *, large: int) -> None:
    """Returns freed memory beyond `kept` bytes, and freed blocks of at least `large` bytes.

    By default glibc raises both limits to sizes that were allocated, and keeps memory per thread.
    """
    _set_allocator((_MMAP_THRESHOLD, large), (_TRIM_THRESHOLD, kept), (_ARENA_MAX, 1))


def keep_freed_memory() -> None:
    """Keeps all freed memory, so that the next step need not request it again."""
    # -1 stands for an unlimited threshold; other numbers end at 2 GiB.
    _set_allocator((_ARENA_MAX, 1), (_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1))


def trim_memory() -> None:
    """Returns all free memory to the system, also between blocks that are in use."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
