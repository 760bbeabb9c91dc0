"""A run writes `result.json` when its last evaluation is done, or when it fails.

`dmljax.files.run_folder` describes the file.
"""

import contextlib
import functools
import importlib.metadata
import pathlib
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

import dmljax
from dmljax.files.run_folder import Chosen, Evaluated, Result, RunFolder, read_if_any, write
from dmljax.train import journal


class Report:
    """Writes the result of one run: `finished`, or `failed` with an error."""

    def __init__(
        self, workdir: pathlib.Path, *, source: str, digests: Mapping[str, str | None], start: float
    ):
        """Reads versions and devices; `start` is the `time.monotonic` at which the run began."""
        config, _, argument = source.partition(":")
        self._workdir, self._start = workdir, start
        self._result_fn = functools.partial(
            Result,
            config=pathlib.Path(config).stem,
            argument=argument,
            digests=dict(digests),
            devices=devices(),
            versions=versions(),
            code=code(),  # now: files may change while the run lasts
        )
        self.earlier_seconds = 0.0  # of the processes before this one
        present = read_if_any(workdir)
        if jax.process_index() == 0 and (present is None or present.status != "finished"):
            RunFolder(workdir).result.unlink(missing_ok=True)  # what an earlier process failed with

    def seconds(self) -> float:
        """Returns the seconds that this run has taken so far."""
        return self.earlier_seconds + time.monotonic() - self._start

    def finished(self, chosen: Chosen, scores: Mapping[str, float], **facts: Any) -> None:
        """Writes the result of a run that came to its end."""
        steps = [row["step"] for row in journal.read(RunFolder(self._workdir).metrics)]
        step = max(steps, default=chosen.step)
        self._write("finished", step=step, chosen=chosen, scores=dict(scores), **facts)

    def failed(self, error: Exception, **facts: Any) -> None:
        """Writes that a run ended with an error, if the folder can be written."""
        status = "diverged" if isinstance(error, FloatingPointError) else "failed"
        message = " ".join(str(error).split()) or type(error).__name__
        with contextlib.suppress(OSError):
            self._write(status, message, step=getattr(error, "step", None), **facts)

    def _write(self, status: str, message: str = "", **facts: Any) -> None:
        if jax.process_index() == 0:
            rows = journal.read(RunFolder(self._workdir).metrics)
            facts = {"chosen": None, "scores": {}, **facts, "evaluations": evaluations(rows)}
            seconds = self.seconds()
            result = self._result_fn(status=status, message=message, wall_seconds=seconds, **facts)
            write(self._workdir, result)


def evaluations(rows: Sequence[Mapping[str, Any]]) -> list[Evaluated]:
    """Returns the evaluations in the lines of `metrics.jsonl`, in the order of their steps."""
    scores: dict[int, dict[str, float | None]] = {}
    for row in rows:
        values = {k: v for k, v in row.items() if k.startswith(("test/", "val/"))}
        if values:
            scores.setdefault(row["step"], {}).update(values)
    return [Evaluated(step, scores[step]) for step in sorted(scores)]


def devices() -> dict[str, Any]:
    """Describes the devices of a run, over all its processes."""
    first = jax.devices()[0]
    return {
        "count": jax.device_count(),
        "platform": first.platform,
        "kind": first.device_kind,
        "processes": jax.process_count(),
        "host": platform.node(),
    }


def versions() -> dict[str, str]:
    """Returns the versions of dmljax, of Python and of the packages that compute."""
    packages = ("jax", "jaxlib", "flax", "optax", "numpy")
    numbers = {package: importlib.metadata.version(package) for package in packages}
    return {"dmljax": dmljax.__version__, "python": platform.python_version(), **numbers}


@functools.cache
def code() -> dict[str, Any] | None:
    """Returns the git revision of dmljax, and if files differ from it; None outside of git."""
    folder = pathlib.Path(dmljax.__file__).parent
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    revision = _git(folder, "rev-parse", "HEAD")
    changes = _git(folder, "status", "--porcelain", "--", ".")
    return None if revision is None else {"revision": revision, "dirty": bool(changes)}


def _git(folder: pathlib.Path, *words: str) -> str | None:
    """Returns what git prints, or None if it fails or is not installed."""
    try:
        process = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True)
    except OSError:
        return None
    return process.stdout.strip() if process.returncode == 0 else None
