"""A test that fails, and a worker that dies or hangs, end the run of the tests within a minute."""

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
    "name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in {names!r}]
)
def test_group(name, i):
    time.sleep(0.1)
    if name == "c" and i == 1:
        {end}
"""
_ENDS = {
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "hung": "time.sleep(600)",
}


def _run(folder, end, names="abcdef"):
    """`_TESTS` on two workers with the options of setup.cfg."""
    file = folder / "test_small.py"
    file.write_text(_TESTS.format(end=end, names=names))
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "setup.cfg"), str(file)]
    command += ["-p", "xdist", "--rootdir", str(folder), "-n", "2", "--dist", "loadgroup"]
    command += ["-o", "faulthandler_timeout=3"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # imports of others take four seconds
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert "test_small.py::test_group[c-1]" in run.stdout and "1 failed" in run.stdout, run
    return run


@pytest.mark.parametrize("end", _ENDS)
def test_a_worker_that_ends_fails_the_run(tmp_path, end):
    run = _run(tmp_path, _ENDS[end])
    assert run.returncode == 1, run.stdout + run.stderr
    assert "node down: Not properly terminated" in run.stdout, run.stdout
    if end == "hung":
        assert "Timeout (0:00:03)!" in run.stderr and "test_small.py" in run.stderr
