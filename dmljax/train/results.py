"""`result.json`: what a run has come to, for programs that compare runs.

A run writes it when its last evaluation is done, or when it fails.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

import dmljax
from dmljax.files.writing import write_json
from dmljax.train import journal

__all__ = [
    "FILE",
    "Chosen",
    "Evaluated",
    "Report",
    "Result",
    "code",
    "devices",
    "evaluations",
    "read",
    "versions",
    "write",
]

FILE, FORMAT = "result.json", 1


class Chosen(NamedTuple):
    """The step whose scores count, and by which rule.

    `score` and `split` are None where the last step counts; otherwise it is the best of
    `candidates` evaluations by that score, the earliest of equals. `uses_test` tells whether test
    scores had a part in the choice: by `select`, or by `reload_best_at`.
    """

    step: int
    score: str | None
    split: str | None
    candidates: int
    sentence: str
    uses_test: bool


class Evaluated(NamedTuple):
    """The scores of one evaluation, named 'test/R@1'."""

    step: int
    scores: dict[str, float]


class Result(NamedTuple):
    """The content of `result.json`.

    * `config`, `argument`: the file or recipe that was named on the command line, and what followed
      its colon.
    * `status`: 'finished', 'diverged' (the loss, the gradient or an embedding was not finite) or
      'failed'; `message` is the error. Unless finished, `chosen` is None and `scores` is empty.
    * `steps`: the planned length. `step`: the last step of training; for a run that diverged the
      step at which it did.
    * `scores`: all scores of the chosen step, named 'test/R@1'. NaN is None.
    * `data`: images and classes of every split. `digests`: see `digests.Digests`.
    * `wall_seconds`: of all processes that trained this run one after another.
    * `code`: the git revision of dmljax and whether files differ from it; None for an installed
      package.
    * `average`: over what a score is a mean, 'queries' or 'classes'.
    """

    config: str
    argument: str
    status: str
    message: str
    step: int | None
    chosen: Chosen | None
    scores: dict[str, float]
    evaluations: Sequence[Evaluated]
    digests: dict[str, str | None]
    data: dict[str, dict[str, int]]
    pretraining: str | None
    seed: int
    steps: int
    wall_seconds: float
    devices: dict[str, Any]
    versions: dict[str, str]
    code: dict[str, Any] | None
    average: str = "queries"


class Report:
    """Writes the result of one run: `finished`, or `failed` with an error."""

    def __init__(
        self, workdir: pathlib.Path, *, source: str, digests: Mapping[str, str | None], start: float
    ):
        """`start` is the time of `time.monotonic` at which this process began with the run."""
        config, _, argument = source.partition(":")
        self._workdir, self._start = workdir, start
        self._constants = {
            "config": pathlib.Path(config).stem,
            "argument": argument,
            "digests": dict(digests),
            "devices": devices(),
            "versions": versions(),
            "code": code(),  # now: files may change while the run lasts
        }
        self.earlier_seconds = 0.0  # of the processes before this one
        if jax.process_index() == 0 and not _is_finished(workdir):
            (workdir / FILE).unlink(missing_ok=True)  # what an earlier process failed with

    def seconds(self) -> float:
        """The seconds that this run has taken so far."""
        return self.earlier_seconds + time.monotonic() - self._start

    def finished(self, chosen: Chosen, scores: Mapping[str, float], **facts: Any) -> None:
        """Writes the result of a run that came to its end."""
        steps = [row["step"] for row in journal.read(self._workdir / "metrics.jsonl")]
        self._write("finished", "", max(steps, default=chosen.step), chosen, dict(scores), facts)

    def failed(self, error: Exception, **facts: Any) -> None:
        """Writes that a run ended with an error, if the folder can be written."""
        status = "diverged" if isinstance(error, FloatingPointError) else "failed"
        message = " ".join(str(error).split()) or type(error).__name__
        with contextlib.suppress(OSError):
            self._write(status, message, getattr(error, "step", None), None, {}, facts)

    def _write(
        self,
        status: str,
        message: str,
        step: int | None,
        chosen: Chosen | None,
        scores: dict[str, float],
        facts: dict[str, Any],
    ) -> None:
        if jax.process_index():
            return
        rows = journal.read(self._workdir / "metrics.jsonl")
        result = Result(
            status=status,
            message=message,
            step=step,
            chosen=chosen,
            scores=scores,
            evaluations=evaluations(rows),
            wall_seconds=self.seconds(),
            **self._constants,
            **facts,
        )
        write(self._workdir, result)


def write(workdir: str | os.PathLike, result: Result) -> None:
    """Writes `result.json` into the folder of a run, completely or not at all."""
    content = {"format": FORMAT, **result._asdict()}
    content["chosen"] = None if result.chosen is None else result.chosen._asdict()
    content["scores"] = _finite(result.scores)
    content["evaluations"] = [
        {"step": step, "scores": _finite(scores)} for step, scores in result.evaluations
    ]
    write_json(pathlib.Path(workdir) / FILE, content, indent=1)


def read(workdir: str | os.PathLike) -> Result:
    """The result of the run in a folder."""
    path = pathlib.Path(workdir) / FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"{workdir} has no result.json: it is not a run folder, or its run has not ended"
        )
    try:
        content = json.loads(path.read_text())
        if content.pop("format") != FORMAT:
            raise ValueError("its format is of another version of dmljax")
        if content["chosen"] is not None:
            content["chosen"] = Chosen(**content["chosen"])
        content["evaluations"] = [Evaluated(**row) for row in content["evaluations"]]
        return Result(**content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is damaged ({error}): the command of the run writes it again"
        ) from error


def _is_finished(workdir: pathlib.Path) -> bool:
    try:
        return read(workdir).status == "finished"
    except (OSError, ValueError):
        return False


def evaluations(rows: Sequence[Mapping[str, Any]]) -> list[Evaluated]:
    """The evaluations among the lines of `metrics.jsonl`, in the order of their steps."""
    scores: dict[int, dict[str, float]] = {}
    for row in rows:
        values = {k: v for k, v in row.items() if k.startswith(("test/", "val/"))}
        if values:
            scores.setdefault(row["step"], {}).update(values)
    return [Evaluated(step, scores[step]) for step in sorted(scores)]


def devices() -> dict[str, Any]:
    """The devices of a run, of all its processes."""
    first = jax.devices()[0]
    return {
        "count": jax.device_count(),
        "platform": first.platform,
        "kind": first.device_kind,
        "processes": jax.process_count(),
        "host": platform.node(),
    }


def versions() -> dict[str, str]:
    """The versions of dmljax, of Python and of the packages that compute."""
    packages = ("jax", "jaxlib", "flax", "optax", "numpy")
    numbers = {package: importlib.metadata.version(package) for package in packages}
    return {"dmljax": dmljax.__version__, "python": platform.python_version(), **numbers}


@functools.cache
def code() -> dict[str, Any] | None:
    """The git revision of dmljax and whether its files differ from it; None outside of git."""
    folder = pathlib.Path(dmljax.__file__).parent
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    revision = _git(folder, "rev-parse", "HEAD")
    changes = _git(folder, "status", "--porcelain", "--", ".")
    return None if revision is None else {"revision": revision, "dirty": bool(changes)}


def _git(folder: pathlib.Path, *words: str) -> str | None:
    """What git prints, or None if it fails or is not installed."""
    try:
        process = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True)
    except OSError:
        return None
    return process.stdout.strip() if process.returncode == 0 else None


def _finite(scores: Mapping[str, float]) -> dict[str, float | None]:
    """Scores for JSON, which has no NaN."""
    return {name: value if math.isfinite(value) else None for name, value in scores.items()}
