"""The command that measures everything on an accelerator works, at tiny sizes on a CPU."""

import json
import os
import subprocess
import sys

import pytest
from processes import ROOT

SCRIPT = ROOT / "benchmarks" / "accelerator.py"


def _run(folder, *words, **environment):
    command = [sys.executable, str(SCRIPT), "--reduced", f"--out={folder / 'a.json'}", *words]
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "1"} | environment
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    return done, json.loads((folder / "a.json").read_text())


def _began(done):
    """The rows that ran."""
    return [text.split(" s  ")[1] for text in done.stderr.splitlines() if " s  " in text]


def test_an_error_of_a_row_is_its_line_and_a_second_call_goes_on(tmp_path):
    rows = ("--rows", "machine", "images")
    done, results = _run(tmp_path, *rows, "--minutes=0")
    assert done.returncode == 1 and "no time was left" in results["images"][0]["error"]
    done, results = _run(tmp_path, *rows)
    assert done.returncode == 0 and _began(done) == ["images"]
    assert results["images"][0]["value"] > 0 and results["machine"][0]["unit"] == "TFLOP/s"
    table = (tmp_path / "a.md").read_text()
    assert table.count("\n|") == 4 and "JPEGs of 500 x 375" in table and "ERROR" not in table


@pytest.mark.slow
def test_every_row_works(tmp_path):
    done, results = _run(tmp_path, "--minutes=60")
    errors = [cells for name in results if name != "device" for cells in results[name]]
    errors = [cells for cells in errors if "error" in cells]
    assert done.returncode == 0 and not errors, errors
    assert len(results) > 15 and all(results.values())
