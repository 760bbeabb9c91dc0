"""A run that still trains, watched: its page is renewed, and nothing is written."""

import os
import pathlib
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from system import tiny

from dmljax.runs import training

ROOT = pathlib.Path(__file__).parents[2]


def _files(folder):
    return {
        str(path.relative_to(folder)): path.stat().st_mtime_ns
        for path in folder.rglob("*")
        if path.is_file()
    }


def _get(address, path="/", host=None):
    request = urllib.request.Request(address + path, headers={"Host": host} if host else {})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return answer.read().decode()


@pytest.mark.slow
def test_a_run_is_served_to_this_machine_and_nothing_is_written(tmp_path):
    run = tmp_path / "run"
    training.run(tiny(tmp_path, steps=3), run)
    before = _files(run)
    command = [sys.executable, "-m", "dmljax.main", "watch", str(run), "--port=0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        try:
            address = re.search(r"http://127.0.0.1:\d+", process.stdout.readline())[0]
            deadline = time.monotonic() + 120
            while (version := int(_get(address, "/version"))) == 0:
                assert time.monotonic() < deadline, "no page was made"
                time.sleep(0.2)
            text = _get(address)
            assert "connect-src 'self'" in text and "<title>run: R@1 " in text
            with pytest.raises(urllib.error.HTTPError, match="403"):
                _get(address, host="elsewhere.example:80")
            with pytest.raises(urllib.error.HTTPError, match="404"):
                _get(address, "/config.json")
            with (run / "metrics.jsonl").open("a") as file:
                file.write('{"step": 4, "test/R@1": 0.5}\n')
            while int(_get(address, "/version")) == version:
                assert time.monotonic() < deadline, "the page was not renewed"
                time.sleep(0.2)
        finally:
            process.terminate()
    after = _files(run)
    after.pop("metrics.jsonl"), before.pop("metrics.jsonl")
    assert after == before
