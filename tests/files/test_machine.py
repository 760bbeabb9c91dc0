"""Cores and memory that a process may use, from the files of the system."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from processes import python

from dmljax.files import machine

MIB = 1 << 20
COUNT = "from dmljax.files import machine; print(machine.core_count())"


@pytest.mark.skipif(shutil.which("taskset") is None, reason="needs taskset")
def test_a_process_counts_the_cores_that_taskset_leaves_it():
    core = str(min(os.sched_getaffinity(0)))
    command = ["taskset", "--cpu-list", core, sys.executable, "-c", COUNT]
    assert subprocess.run(command, capture_output=True, text=True).stdout.strip() == "1"
    assert machine.core_count() == len(os.sched_getaffinity(0)) <= os.cpu_count()


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
    monkeypatch.setattr(machine, "_scheduler_cores", lambda: 64)
    group = "sys/fs/cgroup/pod"
    root = _root(tmp_path, **{f"{group}/cpu.max": limit, f"{group}/job/cpu.max": "max 100000"})
    assert machine.core_count(root) == expected


@pytest.mark.parametrize("quota, expected", [(-1, 64), (250000, 3), (10000, 1)])
def test_a_limit_of_a_group_of_version_1_counts(tmp_path, monkeypatch, quota, expected):
    monkeypatch.setattr(machine, "_scheduler_cores", lambda: 64)
    group = "sys/fs/cgroup/cpu/job/cpu.cfs_"
    root = _root(tmp_path, **{f"{group}quota_us": quota, f"{group}period_us": 100000})
    assert machine.core_count(root) == expected


def write(root, **texts):
    for name, text in texts.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def root(tmp_path):
    write(tmp_path, proc__meminfo="MemTotal: 9000 kB\nMemAvailable:    8192 kB\n")
    return tmp_path


def group(root, place, *, names, limit, used, stat="anon 5\n"):
    folder = root / "sys/fs/cgroup" / place
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in zip(names, (f"{limit}\n", f"{used}\n", stat), strict=True):
        (folder / name).write_text(text)


V2 = ("memory.max", "memory.current", "memory.stat")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")


def test_without_a_limit_the_machine_decides(root):
    assert machine.free_memory(root) == 8 * MIB
    write(root, proc__self__cgroup="0::/a/b\n1:cpu:/\n")
    group(root, "a/b", names=V2, limit="max", used=3 * MIB)
    assert machine.free_memory(root) == 8 * MIB


def test_the_tightest_group_decides(root):
    write(root, proc__self__cgroup="0::/a/b\n")
    group(root, "a/b", names=V2, limit=6 * MIB, used=1 * MIB)
    assert machine.free_memory(root) == 5 * MIB
    group(root, "a", names=V2, limit=4 * MIB, used=2 * MIB)
    assert machine.free_memory(root) == 2 * MIB
    group(root, "a", names=V2, limit=4 * MIB, used=2 * MIB, stat=f"inactive_file {MIB}\n")
    assert machine.free_memory(root) == 3 * MIB
    group(root, "a", names=V2, limit=4 * MIB, used=9 * MIB)
    assert machine.free_memory(root) == 0


def test_the_group_of_a_container_is_the_topmost_folder(root):
    write(root, proc__self__cgroup="0::/\n")
    group(root, "", names=V2, limit=6 * MIB, used=2 * MIB)
    assert machine.free_memory(root) == 4 * MIB


def test_groups_of_version_1(root):
    write(root, proc__self__cgroup="5:memory:/job\n4:cpu,cpuacct:/\n0::/\n")
    stat = f"inactive_file 7\ntotal_inactive_file {MIB}\n"
    group(root, "memory/job", names=V1, limit=6 * MIB, used=4 * MIB, stat=stat)
    assert machine.free_memory(root) == 3 * MIB


def test_a_real_group(tmp_path):
    """A process that joins a group of 300 MiB has no more than this."""
    parent = pathlib.Path("/sys/fs/cgroup")
    files = ("memory.max", "cgroup.procs")
    if not (parent / "cgroup.controllers").exists():
        parent, files = parent / "memory", ("memory.limit_in_bytes", "cgroup.procs")
    place = parent / f"dmljax-{os.getpid()}"
    try:
        place.mkdir()
        (place / files[0]).write_text(str(300 * MIB))
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    code = (
        "import os, pathlib, sys; pathlib.Path(sys.argv[1]).write_text(str(os.getpid()));"
        "from dmljax.files import machine; print(machine.free_memory())"
    )
    try:
        assert 200 * MIB < int(python(code, place / files[1]).stdout) <= 300 * MIB
    finally:
        place.rmdir()
