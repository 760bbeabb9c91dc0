"""A short form of `benchmarks/siege.py`, with bounds that a busy machine keeps."""

import re
import subprocess
import sys

import pytest
from service_cases import ROOT, environment

pytestmark = pytest.mark.xdist_group("serve")


@pytest.mark.slow
def test_no_attack_stops_the_service_or_other_clients(bundle_folder):
    command = [sys.executable, ROOT / "benchmarks" / "siege.py", f"--bundle={bundle_folder}"]
    command += ["--seconds=25", "--p99=15", "--growth=0.5"]
    completed = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=ROOT)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "restarts: 0\n" in completed.stdout
    count = re.search(r"answers to ordinary clients: ([\d,]+)", completed.stdout)[1]
    assert int(count.replace(",", "")) > 300
