"""The memory that this process may still take."""

import os
import pathlib

from dmljax.files import groups

# Files of control groups, of version 2 and of version 1: the limit, and what is used.
_FILES = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def free_memory(root: pathlib.Path = pathlib.Path("/")) -> int:
    """Bytes that the machine has, and that the limits of a container or a batch job leave.

    Memory that holds copies of files counts as free: the system takes it back when it is needed.
    """
    return min([_of_machine(root), *_of_groups(root)])


def _of_machine(root: pathlib.Path) -> int:
    for line in groups.lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _of_groups(root: pathlib.Path) -> list[int]:
    """What each control group of this process leaves that has a limit."""
    left = []
    for folder in groups.folders("memory", root):
        for limit_file, used_file in _FILES:
            limit, used = groups.lines(folder / limit_file), groups.lines(folder / used_file)
            if used and limit and limit[0].isdigit():
                left.append(max(0, int(limit[0]) - int(used[0]) + _files_bytes(folder)))
    return left


def _files_bytes(group: pathlib.Path) -> int:
    values = dict(line.split() for line in groups.lines(group / "memory.stat"))
    return int(values.get("total_inactive_file", values.get("inactive_file", 0)))
