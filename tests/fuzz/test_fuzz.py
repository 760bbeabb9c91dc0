"""Damaged files are read or refused in one line, without a crash: see `readers.py`.

Requests over HTTP have their own test, `test_damaged_requests_are_answered_in_one_line` of
`tests/serve/test_service.py`.
"""

import os
import pathlib
import subprocess
import sys

import pytest
from fuzz import readers

HERE = pathlib.Path(__file__).parent
FAST = {"images": 70, "weights": 90, "index": 12, "result": 60, "study": 60}


def _fuzz(tmp_path, seed, counts):
    words = [sys.executable, HERE / "readers.py", tmp_path, str(seed)]
    words += [f"{name}={count}" for name, count in counts.items()]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    environment.pop("JAX_NUMPY_RANK_PROMOTION", None)
    completed = subprocess.run(words, capture_output=True, text=True, env=environment)
    # A negative status is a crash; FOLDER/NAME/case has the file.
    assert completed.returncode == 0, (completed.stdout[-3000:], completed.stderr[-3000:])
    assert all(f"{name}: " in completed.stdout for name in counts)


def test_damaged_files_are_read_or_refused_in_one_line(tmp_path):
    _fuzz(tmp_path, 0, FAST)


@pytest.mark.slow
@pytest.mark.parametrize("name", readers.READERS)
def test_damaged_files_for_a_minute(tmp_path, name):
    _fuzz(tmp_path, 1, {name: "minute"})


@pytest.mark.parametrize(
    "read_fn, message",
    [
        (lambda path: [0] * 10**7, "bytes of memory"),
        (lambda path: {}["a"], "KeyError"),
        (lambda path: int("two\nlines"), None),
    ],
)
def test_what_a_reader_may_not_do_is_noticed(tmp_path, read_fn, message):
    (tmp_path / "file").write_bytes(b"data")

    def broken(path):
        try:
            read_fn(path)
        except (ValueError, OSError):
            raise ValueError("two\nlines") from None

    problem = readers.check(readers.Reader(None, broken), tmp_path / "file")[1]
    assert (message or "no error of one line") in problem
