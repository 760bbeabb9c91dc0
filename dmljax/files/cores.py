"""The cores of this process."""

import math
import os
import pathlib

from dmljax.files import groups


def count(root: pathlib.Path = pathlib.Path("/")) -> int:
    """How many cores this process may use; a machine may have more.

    `taskset` and schedulers leave a process some of the cores. The CPU limit of a container is a
    share of the time of all cores: a limit of 1.5 counts as two cores.
    """
    return min([_of_scheduler(), *_of_groups(root)])


def _of_scheduler() -> int:
    if hasattr(os, "process_cpu_count"):  # Python 3.13
        return os.process_cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _of_groups(root: pathlib.Path) -> list[int]:
    """The cores that each control group of this process leaves that has a limit."""
    counts = []
    for folder in groups.folders("cpu", root):
        words = " ".join(groups.lines(folder / "cpu.max")).split()  # version 2
        if not words:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            words = [line for name in names for line in groups.lines(folder / name)]
        if len(words) == 2 and all(word.isdigit() for word in words):  # not "max", nor -1
            quota, period = map(int, words)
            counts.append(max(1, math.ceil(quota / period)))
    return counts
