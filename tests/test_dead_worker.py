"""A worker that dies or hangs fails the run of the tests within a minute."""

import os
import subprocess
import sys

import pytest
from processes import ROOT

# Groups like those of conftest.py; one worker ends in the middle of a group.
_TESTS = """
import os, signal, time
import pytest

@pytest.mark.parametrize("i", range(3))
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in "abcdef"]
)
def test_group(name, i):
    time.sleep(0.1)
    if name == "c" and i == 1:
        {end}
"""
_ENDS = {
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "crashed": "os.kill(os.getpid(), signal.SIGSEGV)",
    "hung": "time.sleep(600)",
}


@pytest.mark.parametrize("end", _ENDS)
def test_a_worker_that_ends_fails_the_run(tmp_path, end):
    file = tmp_path / "test_small.py"
    file.write_text(_TESTS.format(end=_ENDS[end]))
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "setup.cfg"), str(file)]
    command += ["--rootdir", str(tmp_path), "-n", "2", "--dist", "loadgroup"]
    command += ["-o", "faulthandler_timeout=5"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert run.returncode == 1, run.stdout + run.stderr
    assert "node down: Not properly terminated" in run.stdout, run.stdout
    assert "test_small.py::test_group[c-1]" in run.stdout and "1 failed" in run.stdout
    if end == "hung":
        assert "Timeout (0:00:05)!" in run.stderr and "test_small.py" in run.stderr
