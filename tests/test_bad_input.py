"""Bad input gets one clear line with the value and the fix."""

import functools
import json
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))
from bad_input import CASES  # noqa: E402


@functools.cache
def found():
    """In an own process: under pytest the type checker would speak first."""
    done = subprocess.run(
        [sys.executable, HERE / "bad_input.py"], capture_output=True, text=True, cwd=HERE.parent
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", CASES)
def test_says_what_and_how(name):
    kind, message = found()[name]
    assert kind in ("ValueError", "TypeError"), (kind, message)
    assert "\n" not in message and len(message) < 800
    for part in CASES[name][1:]:
        assert part in message
