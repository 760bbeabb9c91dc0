"""Cores are counted as the scheduler allows them to this process."""

import os
import shutil
import subprocess
import sys

import pytest

from dmljax.files import cores

COUNT = "from dmljax.files import cores; print(cores.count())"


@pytest.mark.skipif(shutil.which("taskset") is None, reason="needs taskset")
def test_a_process_counts_the_cores_that_taskset_leaves_it():
    core = str(min(os.sched_getaffinity(0)))
    command = ["taskset", "--cpu-list", core, sys.executable, "-c", COUNT]
    assert subprocess.run(command, capture_output=True, text=True).stdout.strip() == "1"
    assert cores.count() == len(os.sched_getaffinity(0)) <= os.cpu_count()


def _root(folder, **files):
    """The files of a system whose process is in the group `job` of version 1 or 2."""
    files = {"proc/self/cgroup": "5:cpu,cpuacct:/job\n4:memory:/other\n0::/pod/job"} | files
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return folder


@pytest.mark.parametrize(
    "limit, expected", [("max 100000", 64), ("400000 100000", 4), ("150000 100000", 2)]
)
def test_a_limit_of_the_time_of_cores_counts(tmp_path, monkeypatch, limit, expected):
    monkeypatch.setattr(cores, "_of_scheduler", lambda: 64)
    group = "sys/fs/cgroup/pod"
    root = _root(tmp_path, **{f"{group}/cpu.max": limit, f"{group}/job/cpu.max": "max 100000"})
    assert cores.count(root) == expected


@pytest.mark.parametrize("quota, expected", [(-1, 64), (250000, 3), (10000, 1)])
def test_a_limit_of_a_group_of_version_1_counts(tmp_path, monkeypatch, quota, expected):
    monkeypatch.setattr(cores, "_of_scheduler", lambda: 64)
    group = "sys/fs/cgroup/cpu/job/cpu.cfs_"
    root = _root(tmp_path, **{f"{group}quota_us": quota, f"{group}period_us": 100000})
    assert cores.count(root) == expected
