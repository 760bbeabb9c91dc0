"""The state of a run: finished, failed, running, or waiting for a process."""

import contextlib
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

from dmljax.files import locks, reading, schema
from dmljax.files import result as results
from dmljax.files.result import Result
from dmljax.files.run_folder import RunFolder
from dmljax.files.writing import make_folder, sync, write_json


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


class _Failure(NamedTuple):
    """The mark of a failed run, in `failure.json`."""

    status: str
    message: str
    exit_status: int
    host: str


def outcome(folder: pathlib.Path) -> Outcome:
    """Returns the outcome of the run in a folder, which need not exist."""
    result = _result(folder)
    if result is not None and result.status == "finished":
        digest = result.digests["run"] or ""
        if digest.startswith(folder.name):
            return Outcome("finished", result=result)
        return Outcome(
            "failed",
            f"its config, data or weights changed while the study ran (digest {digest[:12]}): "
            f"delete {folder} to run it again",
        )
    failure = read_json(RunFolder(folder).failure, _Failure, "the run continues")
    if failure is not None:
        return Outcome(failure.status, failure.message)
    if not folder.is_dir():
        return Outcome("waiting")
    with locked(folder, shared=True) as file:
        return Outcome("waiting" if file is not None else "running")


def _result(folder: pathlib.Path) -> Result | None:
    with contextlib.suppress(FileNotFoundError):
        return results.read(folder)
    return None


def read_json(path: pathlib.Path, kind: Any, effect: str) -> Any:
    """Reads JSON as the type `kind` of `schema.parse`; None without the file.

    The error for a damaged file tells the user to delete it, with this `effect`.
    """
    try:
        return schema.parse(kind, reading.json_value(path.read_bytes()))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): delete it, and {effect}") from error


@contextlib.contextmanager
def locked(folder: pathlib.Path, *, shared: bool = False) -> Iterator[IO[str] | None]:
    """Yields the open lock file of a run's folder, or None while another process works on the run.

    A process that inherits the file holds the lock as well: a run whose parent was killed stays
    locked until the run itself ends.
    """
    try:
        file = locks.lock(RunFolder(folder).study_lock, shared=shared)
    except locks.Taken:
        yield None
    else:
        with file:
            yield file


def check_locks(folder: pathlib.Path) -> None:
    """Raises unless the file system of a folder keeps a second process from a locked file."""
    make_folder(folder)
    code = (
        "import pathlib, sys; from dmljax.files import locks; locks.lock(pathlib.Path(sys.argv[1]))"
    )
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".lock-") as file:
        try:
            with locks.lock(pathlib.Path(file.name)):
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
    failure = _Failure(status, message, exit_status, os.uname().nodename)
    write_json(RunFolder(folder).failure, failure._asdict(), indent=1)


def forget_failure(folder: pathlib.Path) -> None:
    """Removes the mark of a failed run, so a process runs it again."""
    RunFolder(folder).failure.unlink(missing_ok=True)
    sync(folder)
