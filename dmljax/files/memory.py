"""The memory that this process may still take."""

from __future__ import annotations

import os
import pathlib

# The hierarchies of control groups: their folder, and their files of the limit and of what is used.
_HIERARCHIES = {
    "": ("sys/fs/cgroup", "memory.max", "memory.current"),
    "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
}


def free_memory(root: pathlib.Path = pathlib.Path("/")) -> int:
    """Bytes that the machine has, and that the limits of a container or a batch job leave.

    Memory that holds copies of files counts as free: the system takes it back when it is needed.
    """
    return min([_of_machine(root), *_of_groups(root)])


def _of_machine(root: pathlib.Path) -> int:
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _of_groups(root: pathlib.Path) -> list[int]:
    """What each control group of this process leaves that has a limit.

    See https://docs.kernel.org/admin-guide/cgroup-v2.html and, for version 1, cgroup-v1/memory.html
    there. In a container, the folders show its own group as the topmost one.
    """
    left = []
    for line in _lines(root / "proc/self/cgroup"):
        kinds, path = line.split(":", 2)[1:]
        for kind in {"", "memory"}.intersection(kinds.split(",")):
            folder, limit_file, used_file = _HIERARCHIES[kind]
            names = pathlib.PurePosixPath(path.lstrip("/"))
            for group in [names, *names.parents]:
                place = root / folder / group
                limit, used = _lines(place / limit_file), _lines(place / used_file)
                if used and limit and limit[0].isdigit():
                    left.append(max(0, int(limit[0]) - int(used[0]) + _files_bytes(place)))
    return left


def _files_bytes(group: pathlib.Path) -> int:
    values = dict(line.split() for line in _lines(group / "memory.stat"))
    return int(values.get("total_inactive_file", values.get("inactive_file", 0)))


def _lines(path: pathlib.Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
