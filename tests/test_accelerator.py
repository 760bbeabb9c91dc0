"""The command that measures everything on an accelerator works, at tiny sizes on a CPU."""

import importlib
import json
import os
import pathlib
import subprocess
import sys
import time

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


def test_a_row_that_is_cut_keeps_its_lines_and_ends_what_it_started(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    accelerator = importlib.import_module("accelerator")
    script = tmp_path / "row.py"
    script.write_text(
        "import json, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print('line ' + json.dumps({'name': 'first', 'child': child.pid}), flush=True)\n"
        "print('line {', end='', flush=True)\n"
        "time.sleep(60)\n"
    )
    monkeypatch.setattr(accelerator, "__file__", str(script))
    before = [{"name": "earlier"}, {"name": "torn", "error": "no time"}]
    earlier, first, cut = accelerator.run_row("losses", True, 5, before)
    assert (earlier["name"], first["name"], cut["name"]) == ("earlier", "first", "losses")
    assert cut["error"] == "no result within 5 s"
    stat = pathlib.Path(f"/proc/{first['child']}/stat")
    for _ in range(50):  # a killed process ends when it gets a core again
        if not stat.exists() or stat.read_text().split()[2] == "Z":
            return
        time.sleep(0.1)
    raise AssertionError("what the row has started still runs")


def test_without_an_accelerator_nothing_is_measured_at_full_size(tmp_path):
    command = [sys.executable, str(SCRIPT), f"--out={tmp_path / 'a.json'}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1 and "JAX sees no accelerator: --reduced" in done.stderr


def test_losses_that_were_measured_are_not_measured_again(tmp_path):
    done, results = _run(tmp_path, "--rows", "losses, tiled")
    assert done.returncode == 0 and len(results["losses, tiled"]) == 9
    results["losses, tiled"][1] = {"name": "multi_similarity", "error": "out of memory"}
    results["losses, tiled"][0]["value"] = -1.0
    (tmp_path / "a.json").write_text(json.dumps(results))
    done, results = _run(tmp_path, "--rows", "losses, tiled", "--minutes=0")
    assert len(results["losses, tiled"]) == 9 and "no time" in results["losses, tiled"][-1]["error"]
    done, results = _run(tmp_path, "--rows", "losses, tiled")
    values = {cells["name"].partition(",")[0]: cells["value"] for cells in results["losses, tiled"]}
    assert values.pop("contrastive") == -1 and len(values) == 8 and min(values.values()) > 0


@pytest.mark.slow
def test_every_row_works(tmp_path):
    done, results = _run(tmp_path, "--minutes=60")
    errors = [cells for name in results if name != "device" for cells in results[name]]
    errors = [cells for cells in errors if "error" in cells]
    assert done.returncode == 0 and not errors, errors
    assert len(results) > 15 and all(results.values())
