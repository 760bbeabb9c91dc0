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
