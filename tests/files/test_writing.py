"""A file is written completely or not at all."""

import json
import os
import signal
import subprocess
import sys

import pytest

from dmljax.files import writing as files


def test_an_error_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "a.json"
    files.write_json(path, {"a": 1})
    with pytest.raises(RuntimeError), files.atomic_writer(path) as file:
        file.write("incomplete")
        raise RuntimeError
    assert json.loads(path.read_text()) == {"a": 1}
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_kill_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"before")
    code = (
        "import os, signal, sys; from dmljax.files import writing as files\n"
        "with files.atomic_writer(sys.argv[1], 'wb') as file:\n"
        "    file.write(b'after'); file.flush(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    completed = subprocess.run([sys.executable, "-c", code, str(path)])
    assert completed.returncode == -signal.SIGKILL and path.read_bytes() == b"before"


def test_a_text_is_written_and_a_missing_folder_is_refused(tmp_path):
    files.write_text(tmp_path / "text", "a\nb")
    assert (tmp_path / "text").read_text() == "a\nb"
    with pytest.raises(FileNotFoundError):
        files.write_text(tmp_path / "missing" / "text", "a")
