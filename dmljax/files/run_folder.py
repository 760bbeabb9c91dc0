"""The files of a run folder: their paths, and `result.json` as typed data. Imports no jax."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any, Literal

from dmljax.files import schema
from dmljax.files.writing import finite, write_json


class RunFolder:
    """The paths in the folder of a run. A new file of a run is one line here.

    `results` lists the paths that a new run in this folder deletes.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = pathlib.Path(path)
        self.results: list[pathlib.Path] = []
        self.config = self.path / "config.json"
        self.digests = self.path / "digests.json"
        self.lock = self.path / "lock"
        # Results of a run.
        self.checkpoints = self._result("checkpoints")
        self.metrics = self._result("metrics.jsonl")
        self.speed = self._result("speed.jsonl")
        self.tensorboard = self._result("tensorboard")
        self.result = self._result("result.json")
        self.scores = self._result("scores.safetensors")
        self.page = self._result("report.html")
        self.frozen = self._result("frozen")  # scores of the backbone without training
        self.frames = self._result("frames")
        self.movie = self._result("movie.gif")
        self.ladder = self._result("ladder.json")
        # Files that a study writes.
        self.study_lock = self.path / "study.lock"
        self.output = self.path / "output.txt"
        self.failure = self.path / "failure.json"

    def _result(self, name: str) -> pathlib.Path:
        self.results.append(self.path / name)
        return self.results[-1]

    @property
    def has_results(self) -> bool:
        """Tells whether a run or a ladder has begun; a checkpoint may be damaged."""
        has_checkpoint = any(self.checkpoints.glob("[0-9]*"))
        return has_checkpoint or self.metrics.exists() or self.ladder.exists()


@dataclasses.dataclass(frozen=True)
class Chosen:
    """The step whose scores count, and the rule that chose it.

    `score` and `split` are None if the last step counts; otherwise `step` is the first step with
    the best score of `candidates` evaluations. `uses_test` tells whether test scores influenced the
    choice, by `select` or by `reload_best_at`.
    """

    step: int
    score: str | None
    split: str | None
    candidates: int
    sentence: str
    uses_test: bool

    @property
    def rule(self) -> str:
        """'last', or a score such as 'val/R@1'."""
        return "last" if self.score is None else f"{self.split}/{self.score}"


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """The scores of one evaluation, named 'test/R@1'; None where a score was NaN."""

    step: int
    scores: dict[str, float | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """The content of `result.json`.

    * `config`, `argument`: the file or recipe on the command line, and the text after its colon.
    * `status`: 'finished', 'diverged' (the loss, the gradient or an embedding was not finite) or
      'failed'; `message` is the error. Unless finished, `chosen` is None and `scores` is empty.
    * `steps`: the planned length. `step`: the last step of training; for a run that diverged the
      step at which it did.
    * `scores`: all scores of the chosen step, named 'test/R@1'. NaN is None.
    * `data`: images and classes of every split. `digests`: see `digests.Digests`.
    * `wall_seconds`: of all processes that trained this run one after another.
    * `code`: the git revision of dmljax and whether files differ from it; None for an installed
      package.
    * `average`: whether a score is a mean over 'queries' or 'classes'.
    * `preprocessing`: the operations on the evaluated images before the net.
    * `against_frozen`: scores and those of the pretrained backbone without training, see
      `runs.frozen.Against`.
    """

    format: Literal[1] = 1
    config: str
    argument: str
    status: str
    message: str
    step: int | None
    chosen: Chosen | None
    scores: dict[str, float | None]
    evaluations: tuple[Evaluated, ...]
    digests: dict[str, str | None]
    data: dict[str, dict[str, int]]
    pretraining: str | None
    seed: int
    steps: int
    wall_seconds: float
    devices: dict[str, Any]
    versions: dict[str, str]
    code: dict[str, Any] | None
    average: str
    preprocessing: str
    against_frozen: tuple[dict[str, Any], ...] = ()


def first_best(scores: Mapping[int, float]) -> int | None:
    """Returns the first step (or number) with the highest score; None without scores.

    Published code saves a checkpoint on strict improvement, which is the same choice.

    >>> first_best({20: 0.5, 10: 0.5, 30: 0.4})
    10
    """
    return max(sorted(scores), key=scores.__getitem__, default=None)


def write(workdir: str | os.PathLike, result: Result) -> None:
    """Writes `result.json` into the folder of a run, completely or not at all."""
    write_json(RunFolder(workdir).result, finite(dataclasses.asdict(result)), indent=1)


def read_if_any(workdir: str | os.PathLike) -> Result | None:
    """Reads the result of a run; returns None if there is none or it cannot be read."""
    try:
        return read(workdir)
    except (OSError, ValueError):
        return None


def read(workdir: str | os.PathLike) -> Result:
    """Reads the result of the run in a folder."""
    path = RunFolder(workdir).result
    if not path.is_file():
        raise FileNotFoundError(
            f"{workdir} has no result.json: it is not a run folder, or its run has not finished"
        )
    try:
        return schema.parse(Result, json.loads(path.read_bytes()))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is damaged ({error}): the command of the run writes it again"
        ) from error
