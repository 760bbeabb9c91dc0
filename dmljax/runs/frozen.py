"""Compares a run that starts from pretrained weights with its frozen backbone.

It is scored before training, on the test split and on held-out classes. After training, the same
queries tell whether the run is better, and whether it may be exported.
"""

import functools
import math
import os
import pathlib
import shlex
import types
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dmljax import metrics
from dmljax.config import method
from dmljax.files.run_folder import RunFolder
from dmljax.report import comparison, scores_file
from dmljax.report.scores_file import QueryScores
from dmljax.runs import folder
from dmljax.train import initial_state
from dmljax.train.evaluation import MAIN, Evaluation, Evaluator
from dmljax.train.journal import Journal
from dmljax.train.run import Run
from dmljax.train.step import TrainState
from dmljax.weights.published import identify

PREFIXES = {"test": "frozen", "val": "frozen_val"}  # of scores in metrics.jsonl
_TITLES = {"test": "the test split", "val": "held-out classes"}
SCORES = ("R@1", "MAP@R")


class Against(NamedTuple):
    """One score of a run and of its frozen backbone, on the same queries of a split.

    `low` and `high` bound the range of the difference over classes, `frozen_low` and
    `frozen_high` the range of the backbone; None for a few classes.
    """

    split: str
    name: str
    trained: float
    frozen: float
    frozen_low: float | None
    frozen_high: float | None
    difference: float
    low: float | None
    high: float | None
    verdict: str

    def __str__(self) -> str:
        has_no_range = self.low is None and not _is_missing(self.difference)
        verdict = "no range over so few classes" if has_no_range else self.verdict
        return f"{self.name} {range_text(self.difference, self.low, self.high)}: {verdict}"

    @property
    def is_worse(self) -> bool:
        """Whether the run is worse by at least 0.1 points after rounding, as printed."""
        return round(100 * self.difference, 1) < 0


def range_text(difference: float | None, low: float | None, high: float | None) -> str:
    """Formats a difference of scores and its range in points: "+1.2 [+0.3, +2.1]".

    Scores that do not exist give "-".
    """
    if difference is None or _is_missing(difference):
        return "-"
    text = f"{100 * difference:+.1f}"
    if low is None or high is None:
        return text
    return f"{text} [{100 * low:+.1f}, {100 * high:+.1f}]"


def _is_missing(difference: float | None) -> bool:
    """Returns whether the scores do not exist: their difference is NaN, in JSON null."""
    return difference is None or math.isnan(difference)


def evaluate(run: Run, evaluator: Evaluator, journal: Journal, workdir: pathlib.Path) -> None:
    """Evaluates the backbone on all splits, before training."""
    score = _score_fn(run, evaluator, workdir)
    for split, prefix in PREFIXES.items():
        if len(run.splits.get(split, ())):
            scores = score(split)
            folder.write_scores(scores, _folder(workdir, split))
            values = {name: _mean(run, scores, name) for name in SCORES}
            journal.evaluation(0, values, split=prefix)


def _score_fn(
    run: Run, evaluator: Evaluator, workdir: str | os.PathLike
) -> Callable[[str], QueryScores]:
    """Returns a function that scores the backbone on a split; it reads the weights once."""
    embed_fn = functools.cache(lambda: evaluator.frozen_fn(initial_state.backbone(run)))

    def score(split: str) -> QueryScores:
        embeddings = embed_fn()(run.splits[split])
        return _scores(run, workdir, split, embeddings, step=0)

    return score


def read(workdir: str | os.PathLike, split: str = "test") -> QueryScores | None:
    """Reads the scores of the frozen backbone of a run; None if none were written."""
    folder = _folder(workdir, split)
    return scores_file.read(folder) if RunFolder(folder).scores.exists() else None


def _folder(workdir: str | os.PathLike, split: str) -> pathlib.Path:
    return RunFolder(workdir).frozen / ("" if split == "test" else split)


def _mean(run: Run, scores: QueryScores, name: str) -> float:
    return metrics.average(scores.values[name], scores.labels, over=run.options.evaluate.average)


def compare(
    run: Run,
    workdir: str | os.PathLike,
    evaluation: Evaluation,
    *,
    step: int,
    known: Mapping[str, QueryScores] = types.MappingProxyType({}),
) -> list[Against]:
    """Compares the evaluation of a step with the frozen backbone, where the run has scored it.

    `known` holds scores of queries of this step that exist already, by split.
    """
    rows = []
    for split, x in _by_split(evaluation).items():
        if (frozen := read(workdir, split)) is not None:
            scores = known.get(split) or _scores(run, workdir, split, x, step=step)
            rows += _against(run, scores, frozen)
    return rows


def _by_split(evaluation: Evaluation) -> dict[str, np.ndarray]:
    test, val = evaluation.test_embeddings, evaluation.val_embeddings
    by_split = {"test": None if test is None else test[MAIN], "val": val}
    return {split: x for split, x in by_split.items() if x is not None}


def _scores(
    run: Run, workdir: str | os.PathLike, split: str, embeddings: np.ndarray, *, step: int
) -> QueryScores:
    return folder.query_scores(run, embeddings, workdir, split=split, step=step)


def _against(run: Run, scores: QueryScores, frozen: QueryScores) -> list[Against]:
    if reason := scores_file.difference(scores, frozen):
        raise ValueError(f"the frozen backbone and the run were scored on other images: {reason}")
    rows = []
    for name in SCORES:
        values = frozen.values[name]
        options: dict = {"groups": frozen.labels, "over": run.options.evaluate.average}
        low, high = metrics.interval(values, **options)
        result = metrics.compare(scores.values[name], values, **options)
        rows.append(
            Against(
                scores.split,
                name,
                trained=_mean(run, scores, name),
                frozen=_mean(run, frozen, name),
                frozen_low=_finite(low),
                frozen_high=_finite(high),
                difference=result.difference,
                low=_finite(result.low),
                high=_finite(result.high),
                verdict=result.verdict,
            )
        )
    return rows


def _finite(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def sentence(rows: Sequence[Against]) -> str:
    """Returns the differences to the frozen backbone as a sentence; "" without any."""
    by_split = {row.split: [r for r in rows if r.split == row.split] for row in rows}
    texts = [f"on {_TITLES[split]} {'; '.join(map(str, of))}" for split, of in by_split.items()]
    return f"Minus the frozen backbone {', '.join(texts)}" if texts else ""


def lines(run: Run, rows: Sequence[Against], workdir: str | os.PathLike) -> list[str]:
    """Returns lines that compare the scores of a run with those of its frozen backbone."""
    if not rows:
        return []
    text = [""]
    trained = "with head" if run.options.trained["name"] == "last" else "trained"
    for split in dict.fromkeys(row.split for row in rows):
        of_split = [row for row in rows if row.split == split]
        text.append(f"{_TITLES[split]:24s}" + "".join(f"{row.name:>8s}" for row in of_split))
        for title, field in (("frozen", "frozen"), (trained, "trained")):
            values = (getattr(row, field) for row in of_split)
            text.append(f"  {title:22s}" + "".join(f"{100 * value:8.1f}" for value in values))
        text.append(
            f"  {trained} minus frozen, {metrics.level_text()} ranges over classes: "
            + "; ".join(map(str, of_split))
        )
    if (worse := _decisive(run, rows)).is_worse:
        command = f"dmljax export {shlex.quote(str(workdir))} --allow-worse --out=run.bundle"
        text.append(
            f"{_worse(worse)}: {bundle_advice(run.start_folder, run.weights)}, and `{command}` "
            "makes one of this run"
        )
    return text


def bundle_advice(start: str | None, weights: str | None) -> str:
    """Returns advice on a bundle of the frozen backbone of a run with these fields."""
    weights = method.first_weights(start, weights)
    if weights is None:
        return "`dmljax export` makes no bundle of the backbone as it is without a file of weights"
    name = identify(weights) if os.path.isfile(weights) else None
    command = f"dmljax export --net={name or 'NAME'} --weights={shlex.quote(weights)}"
    return f"`{command} --out=frozen.bundle` makes a bundle of the backbone as it is"


def _worse(row: Against) -> str:
    return comparison.worse_text(
        row.name,
        row.trained,
        row.frozen,
        row.difference,
        row.low,
        row.high,
        baseline="frozen",
        where=f" on {_TITLES[row.split]}",
    )


def _decisive(run: Run, rows: Sequence[Against]) -> Against:
    """Returns the row that decides: of held-out classes if possible, by the score that chooses."""
    chosen_by = run.selection.score
    name = chosen_by if chosen_by in SCORES and not run.selection.is_last else "MAP@R"
    by_split = {row.split: row for row in rows if row.name == name}
    return by_split.get("val") or by_split["test"]


def check(
    run: Run,
    state: TrainState,
    workdir: str | os.PathLike,
    evaluation: Evaluation,
    evaluator: Evaluator,
    *,
    allow_worse: bool,
) -> list[Against]:
    """Compares a run with its frozen backbone; raises if it is worse, unless `allow_worse`.

    Scores of the backbone that the run did not write are computed from its weights.
    """
    if run.weights is None and run.options.start is None:
        return []
    if evaluation.val_embeddings is None and run.held_out is not None and len(run.held_out):
        embeddings = evaluator.embeddings(state, run.held_out)[MAIN]
        evaluation = evaluation._replace(val_embeddings=embeddings)
    rows: list[Against] = []
    score = _score_fn(run, evaluator, workdir)
    try:
        for split, x in _by_split(evaluation).items():
            frozen = read(workdir, split) or score(split)
            scores = _scores(run, workdir, split, x, step=int(state.step))
            rows += _against(run, scores, frozen)
    except (OSError, ValueError) as error:
        if allow_worse:
            return []
        raise ValueError(
            f"the run cannot be compared with the backbone that it started from: {error}. To "
            "export it without this comparison: --allow-worse"
        ) from error
    worst = _decisive(run, rows)
    if _is_missing(worst.difference) and not allow_worse:
        raise ValueError(
            f"the run cannot be compared with the backbone that it started from: {worst.name} is "
            "not a number. To export it without this comparison: --allow-worse"
        )
    if worst.is_worse and not allow_worse:
        raise ValueError(
            f"{_worse(worst)}. To export it all the same: --allow-worse; "
            f"{bundle_advice(run.start_folder, run.weights)}"
        )
    return rows
