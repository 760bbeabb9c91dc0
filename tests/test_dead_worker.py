"""A test that fails, and a worker that dies or hangs, end the run of the tests within a minute."""

import os
import subprocess
import sys

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
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "e" and i == 1:
        time.sleep(600)
"""


def test_a_worker_that_dies_or_hangs_fails_the_run(tmp_path):
    """`_TESTS` on two workers with the options of setup.cfg."""
    file = tmp_path / "test_small.py"
    file.write_text(_TESTS)
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "setup.cfg"), str(file)]
    command += ["-p", "xdist", "--rootdir", str(tmp_path), "-n", "2", "--dist", "loadgroup"]
    command += ["-o", "faulthandler_timeout=2", "--maxfail=9"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # imports of others take four seconds
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert run.returncode == 1 and "2 failed" in run.stdout, run.stdout + run.stderr
    for test in ("test_small.py::test_group[c-1]", "test_small.py::test_group[e-1]"):
        assert test in run.stdout, run.stdout
    assert run.stdout.count("node down: Not properly terminated") == 2, run.stdout
    assert "Timeout (0:00:02)!" in run.stderr and "test_small.py" in run.stderr
