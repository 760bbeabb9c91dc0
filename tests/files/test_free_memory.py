"""The memory that a process may still take, from the files of the system."""

import os
import pathlib

import pytest
from processes import python

from dmljax.files import memory

MIB = 1 << 20


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
    assert memory.free_memory(root) == 8 * MIB
    write(root, proc__self__cgroup="0::/a/b\n1:cpu:/\n")
    group(root, "a/b", names=V2, limit="max", used=3 * MIB)
    assert memory.free_memory(root) == 8 * MIB


def test_the_tightest_group_decides(root):
    write(root, proc__self__cgroup="0::/a/b\n")
    group(root, "a/b", names=V2, limit=6 * MIB, used=1 * MIB)
    assert memory.free_memory(root) == 5 * MIB
    group(root, "a", names=V2, limit=4 * MIB, used=2 * MIB)
    assert memory.free_memory(root) == 2 * MIB
    group(root, "a", names=V2, limit=4 * MIB, used=2 * MIB, stat=f"inactive_file {MIB}\n")
    assert memory.free_memory(root) == 3 * MIB
    group(root, "a", names=V2, limit=4 * MIB, used=9 * MIB)
    assert memory.free_memory(root) == 0


def test_the_group_of_a_container_is_the_topmost_folder(root):
    write(root, proc__self__cgroup="0::/\n")
    group(root, "", names=V2, limit=6 * MIB, used=2 * MIB)
    assert memory.free_memory(root) == 4 * MIB


def test_groups_of_version_1(root):
    write(root, proc__self__cgroup="5:memory:/job\n4:cpu,cpuacct:/\n0::/\n")
    stat = f"inactive_file 7\ntotal_inactive_file {MIB}\n"
    group(root, "memory/job", names=V1, limit=6 * MIB, used=4 * MIB, stat=stat)
    assert memory.free_memory(root) == 3 * MIB


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
        "from dmljax.files import memory; print(memory.free_memory())"
    )
    try:
        assert 200 * MIB < int(python(code, place / files[1]).stdout) <= 300 * MIB
    finally:
        place.rmdir()
