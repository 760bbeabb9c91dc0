"""Cores and memory that a process may use, from the files of the system."""

import os
import shutil
import subprocess
import sys

import pytest

from dmljax.files import machine

MIB = 1 << 20
COUNT = "from dmljax.files import machine; print(machine.core_count())"


@pytest.mark.skipif(shutil.which("taskset") is None, reason="needs taskset")
def test_a_process_counts_the_cores_that_taskset_leaves_it():
    core = str(min(os.sched_getaffinity(0)))
    command = ["taskset", "--cpu-list", core, sys.executable, "-c", COUNT]
    assert subprocess.run(command, capture_output=True, text=True).stdout.strip() == "1"
    assert machine.core_count() == len(os.sched_getaffinity(0)) <= os.cpu_count()


def write(root, texts):
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


GROUP = "0::/pod/job"
CPU = "sys/fs/cgroup/pod/cpu.max"


@pytest.mark.parametrize(
    "limit, expected", [("max 100000", 64), ("400000 100000", 4), ("150000 100000", 2)]
)
def test_a_limit_of_the_time_of_cores_counts(tmp_path, monkeypatch, limit, expected):
    monkeypatch.setattr(machine, "_scheduler_cores", lambda: 64)
    write(tmp_path, {"proc/self/cgroup": GROUP, CPU: limit})
    assert machine.core_count(tmp_path) == expected


def group(place, *, limit, used, stat="anon 5"):
    """The files of a group."""
    values = {"max": limit, "current": used, "stat": stat}
    return {f"sys/fs/cgroup/{place}/memory.{name}": value for name, value in values.items()}


UNLIMITED = group("pod/job", limit="max", used=3 * MIB)
JOB = group("pod/job", limit=6 * MIB, used=1 * MIB)


@pytest.mark.parametrize(
    "files, expected",
    [
        ({}, 8),
        (UNLIMITED, 8),
        (JOB, 5),
        (JOB | group("pod", limit=4 * MIB, used=2 * MIB), 2),  # the tightest one
        (JOB | group("pod", limit=4 * MIB, used=2 * MIB, stat=f"inactive_file {MIB}"), 3),
        (JOB | group("pod", limit=4 * MIB, used=9 * MIB), 0),
        (group("", limit=6 * MIB, used=2 * MIB), 4),  # of a container
    ],
)
def test_a_limit_of_memory_counts(tmp_path, files, expected):
    memory = "MemTotal: 9000 kB\nMemAvailable:    8192 kB"
    write(tmp_path, {"proc/self/cgroup": GROUP, "proc/meminfo": memory} | files)
    assert machine.free_memory(tmp_path) == expected * MIB
