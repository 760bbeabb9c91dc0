"""`result.json`: the result of a run, for programs that compare runs. Imports no jax."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dmljax.files import reading, schema
from dmljax.files.run_folder import RunFolder
from dmljax.files.writing import finite, write_json

FORMAT = 1


class Chosen(NamedTuple):
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


class Evaluated(NamedTuple):
    """The scores of one evaluation, named 'test/R@1'; None where a score was NaN."""

    step: int
    scores: dict[str, float | None]


class Result(NamedTuple):
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

    config: str
    argument: str
    status: str
    message: str
    step: int | None
    chosen: Chosen | None
    scores: dict[str, float | None]
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
    average: str
    preprocessing: str
    against_frozen: Sequence[dict[str, Any]] = ()


def first_best(scores: Mapping[int, float]) -> int | None:
    """Returns the first step (or number) with the highest score; None without scores.

    Published code saves a checkpoint on strict improvement, which is the same choice.

    >>> first_best({20: 0.5, 10: 0.5, 30: 0.4})
    10
    """
    return max(sorted(scores), key=scores.__getitem__, default=None)


def write(workdir: str | os.PathLike, result: Result) -> None:
    """Writes `result.json` into the folder of a run, completely or not at all."""
    content = {"format": FORMAT, **result._asdict()}
    content["chosen"] = None if result.chosen is None else result.chosen._asdict()
    content["against_frozen"] = [_finite(row) for row in result.against_frozen]
    content["scores"] = _finite(result.scores)
    evaluations = ({"step": x.step, "scores": _finite(x.scores)} for x in result.evaluations)
    content["evaluations"] = list(evaluations)
    write_json(RunFolder(workdir).result, content, indent=1)


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
        content = schema.parse(dict[str, Any], reading.json_value(path.read_bytes()))
        if content.pop("format", None) != FORMAT or "run" not in content.get("digests", ()):
            raise ValueError("its format is unknown")
        return schema.parse(Result, content)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged ({error}): the command of the run writes it again"
        ) from error


def _finite(scores: Mapping[str, Any]) -> dict[str, Any]:
    return {name: finite(value) for name, value in scores.items()}
