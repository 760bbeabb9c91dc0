"""The state of a run: finished, failed, running, or waiting for a process."""

import contextlib
import dataclasses
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import IO, NamedTuple

from dmljax.files import reading
from dmljax.files import run_folder as results
from dmljax.files.run_folder import Result, RunFolder
from dmljax.files.writing import Taken, lock, make_folder, sync, write_json


class Outcome(NamedTuple):
    """`state` is 'finished', 'failed', 'diverged', 'running' or 'waiting'.

    `result` is set if the run is finished; `message` says why a run failed.
    """

    state: str
    message: str = ""
    result: Result | None = None

    @property
    def is_over(self) -> bool:
        """Whether no process needs to do anything more."""
        return self.state == "finished" or self.has_failed

    @property
    def has_failed(self) -> bool:
        """Whether the run ended with an error."""
        return self.state in ("failed", "diverged")


@dataclasses.dataclass(frozen=True)
class _Failure:
    """The mark of a failed run, in `failure.json`."""

    status: str
    message: str
    exit_status: int
    host: str


def outcome(folder: pathlib.Path) -> Outcome:
    """Returns the outcome of the run in a folder, which need not exist."""
    result, files = _result(folder), RunFolder(folder)
    if result is not None and result.status == "finished":
        digest = result.digests.get("run") or ""
        if digest.startswith(folder.name):
            return Outcome("finished", result=result)
        return Outcome(
            "failed",
            f"its config, data or weights changed while the study ran (digest {digest[:12]}): "
            f"delete {folder} to run it again",
        )
    with contextlib.suppress(FileNotFoundError):  # another process may delete it now
        failure = reading.json_file(files.failure, _Failure)
        return Outcome(failure.status, failure.message)
    if not folder.is_dir():
        return Outcome("waiting")
    with locked(folder, shared=True) as file:
        return Outcome("waiting" if file is not None else "running")


def _result(folder: pathlib.Path) -> Result | None:
    with contextlib.suppress(FileNotFoundError):
        return results.read(folder)
    return None


@contextlib.contextmanager
def locked(folder: pathlib.Path, *, shared: bool = False) -> Iterator[IO[str] | None]:
    """Yields the open lock file of a run's folder, or None while another process works on the run.

    A process that inherits the file holds the lock as well: a run whose parent was killed stays
    locked until the run itself ends.
    """
    try:
        file = lock(RunFolder(folder).study_lock, shared=shared)
    except Taken:
        yield None
    else:
        with file:
            yield file


def check_locks(folder: pathlib.Path) -> None:
    """Raises unless the file system of a folder keeps a second process from a locked file."""
    make_folder(folder)
    code = (
        "import pathlib, sys; from dmljax.files import writing; "
        "writing.lock(pathlib.Path(sys.argv[1]))"
    )
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".lock-") as file:
        try:
            with lock(pathlib.Path(file.name)):
                words = [sys.executable, "-c", code, file.name]
                second = subprocess.run(words, capture_output=True, text=True)
                is_locked = "Taken" in second.stderr
        except OSError:  # such as "No locks available"
            is_locked = False
    if not is_locked:
        raise OSError(
            f"the file system of {folder} has no working locks (flock), by which processes share "
            "runs: mount it with locks (Lustre: -o flock; NFS: without nolock), or choose a folder "
            "on another one by --workdir and --runs"
        )


def mark_failed(folder: pathlib.Path, message: str, *, exit_status: int) -> None:
    """Marks a run as failed, so processes go on with others. `forget_failure` removes the mark."""
    result = _result(folder)
    status = "diverged" if result is not None and result.status == "diverged" else "failed"
    content = {"status": status, "message": message, "exit_status": exit_status}
    write_json(RunFolder(folder).failure, content | {"host": os.uname().nodename}, indent=1)


def forget_failure(folder: pathlib.Path) -> None:
    """Removes the mark of a failed run, so a process runs it again."""
    RunFolder(folder).failure.unlink(missing_ok=True)
    sync(folder)
