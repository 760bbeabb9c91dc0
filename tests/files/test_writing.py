"""A file is written completely or not at all."""

import hashlib
import json
import os
import signal

import pytest
from processes import python

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
    python(code, path, status=-signal.SIGKILL)
    assert path.read_bytes() == b"before"


def test_a_text_is_written_and_a_missing_folder_is_refused(tmp_path):
    files.write_text(tmp_path / "text", "a\nb")
    assert (tmp_path / "text").read_text() == "a\nb"
    for folder in (tmp_path / "missing", tmp_path / "text"):
        message = (
            f"^{folder / 'a.html'} cannot be written: {folder} is not a folder; make it first$"
        )
        with pytest.raises(FileNotFoundError, match=message):
            files.write_text(folder / "a.html", "a")


def test_a_digest_is_computed_once_until_the_file_changes(tmp_path):
    path, other = tmp_path / "a.pth", tmp_path / "b.pth"
    path.write_bytes(b"first")
    os.utime(path, ns=(1, 1))
    first = files.digest_once(path)
    assert first == files.sha256(path) == hashlib.sha256(b"first").hexdigest()
    assert files.digest_once(path, "sha1") == hashlib.sha1(b"first").hexdigest()
    path.write_bytes(b"other")  # of the same size
    os.utime(path, ns=(1, 1))
    assert files.digest_once(path) == first  # which shows that it is not read again
    os.utime(path, ns=(1, 2))
    assert files.digest_once(path) == hashlib.sha256(b"other").hexdigest()
    other.write_bytes(b"third")
    os.utime(other, ns=(1, 2))
    other.replace(path)  # as programs replace files that are complete
    assert files.digest_once(path) == hashlib.sha256(b"third").hexdigest()
