"""Compares a run that starts from pretrained weights with its frozen backbone.

It is scored before training, on the test split and on held-out classes. After training, the same
queries tell whether the run is better, and whether it may be exported.
"""

import itertools
import math
import os
import pathlib
import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dmljax import metrics
from dmljax.config import method
from dmljax.files.run_folder import RunFolder
from dmljax.files.writing import finite
from dmljax.report import comparison, scores_file
from dmljax.report.scores_file import QueryScores
from dmljax.runs import folder
from dmljax.train import start
from dmljax.train.evaluation import MAIN, Evaluator
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
        has_range = self.low is not None or self.is_missing
        verdict = self.verdict if has_range else "no range over so few classes"
        return f"{self.name} {self.range_text}: {verdict}"

    @property
    def is_missing(self) -> bool:
        """Whether the scores do not exist: their difference is NaN, in JSON null."""
        return self.difference is None or math.isnan(self.difference)

    @property
    def is_worse(self) -> bool:
        """Whether the run is worse by at least 0.1 points after rounding, as printed."""
        return not self.is_missing and round(100 * self.difference, 1) < 0

    @property
    def range_text(self) -> str:
        """The difference and its range in points: "+1.2 [+0.3, +2.1]"; "-" if it is missing."""
        if self.is_missing:
            return "-"
        points = [
            f"{100 * x:+.1f}" for x in (self.difference, self.low, self.high) if x is not None
        ]
        return points[0] + (f" [{', '.join(points[1:])}]" if points[1:] else "")

    @property
    def worse_text(self) -> str:
        """The difference in words, for a run that is worse than its backbone."""
        values = self.trained, self.frozen, self.difference, self.low, self.high
        where = f" on {_TITLES[self.split]}"
        return comparison.worse_text(self.name, values, baseline="frozen", where=where)


def evaluate(run: Run, evaluator: Evaluator, journal: Journal, workdir: pathlib.Path) -> None:
    """Evaluates the backbone on all splits, before training."""
    for split, scores in _baselines(run, workdir, evaluator).items():
        folder.write_scores(scores, _folder(workdir, split))
        values = {name: _mean(run, scores, name) for name in SCORES}
        journal.evaluation(0, values, split=PREFIXES[split])


def _baselines(
    run: Run, workdir: str | os.PathLike, evaluator: Evaluator | None = None
) -> dict[str, QueryScores]:
    """Reads the scores of the backbone by split; an `evaluator` computes those not written."""
    folders = {x: _folder(workdir, x) for x in PREFIXES if len(run.splits.get(x, ()))}
    scores = {x: scores_file.read(p) for x, p in folders.items() if RunFolder(p).scores.exists()}
    missing = [] if evaluator is None else [split for split in folders if split not in scores]
    if evaluator is not None and missing:
        embed_fn = evaluator.frozen_fn(start.backbone(run))
        for split in missing:
            x = embed_fn(run.splits[split])
            scores[split] = folder.query_scores(run, x, workdir, split=split, step=0)
    return {split: scores[split] for split in PREFIXES if split in scores}


def _folder(workdir: str | os.PathLike, split: str) -> pathlib.Path:
    return RunFolder(workdir).frozen / ("" if split == "test" else split)


def _mean(run: Run, scores: QueryScores, name: str) -> float:
    return metrics.average(scores.values[name], scores.labels, over=run.options.evaluate.average)


def compare(
    run: Run,
    workdir: str | os.PathLike,
    scores: Mapping[str, QueryScores],
    evaluator: Evaluator | None = None,
) -> list[Against]:
    """Compares the scores of splits with the frozen backbone, where the run has scored it.

    With an `evaluator`, scores of the backbone that the run did not write are computed.
    """
    baselines = _baselines(run, workdir, evaluator).items()
    rows = [_against(run, scores[split], x) for split, x in baselines if split in scores]
    return list(itertools.chain.from_iterable(rows))


def _against(run: Run, scores: QueryScores, frozen: QueryScores) -> list[Against]:
    average = run.options.evaluate.average
    result = comparison.compare_runs({"frozen": frozen, "the run": scores}, average=average)
    rows = []
    for name in SCORES:
        plain, trained = result.scores[name]["frozen"], result.scores[name]["the run"]
        assert trained.comparison is not None
        ranges = plain.low, plain.high, trained.comparison.low, trained.comparison.high
        frozen_low, frozen_high, low, high = map(finite, ranges)
        rows.append(
            Against(
                split=scores.split,
                name=name,
                trained=trained.mean,
                frozen=plain.mean,
                frozen_low=frozen_low,
                frozen_high=frozen_high,
                difference=trained.comparison.difference,
                low=low,
                high=high,
                verdict=trained.comparison.verdict,
            )
        )
    return rows


def _by_split(rows: Sequence[Against]) -> dict[str, list[Against]]:
    return {row.split: [r for r in rows if r.split == row.split] for row in rows}


def sentence(rows: Sequence[Against]) -> str:
    """Returns the differences to the frozen backbone as a sentence; "" without any."""
    texts = [f"on {_TITLES[k]} {'; '.join(map(str, of))}" for k, of in _by_split(rows).items()]
    return f"Minus the frozen backbone {', '.join(texts)}" if texts else ""


def lines(run: Run, rows: Sequence[Against], workdir: str | os.PathLike) -> list[str]:
    """Returns lines that compare the scores of a run with those of its frozen backbone."""
    if not rows:
        return []
    text = [""]
    trained = "with head" if run.options.trained["name"] == "last" else "trained"
    for split, of_split in _by_split(rows).items():
        text.append(f"{_TITLES[split]:24s}" + "".join(f"{row.name:>8s}" for row in of_split))
        for title, field in (("frozen", "frozen"), (trained, "trained")):
            values = (getattr(row, field) for row in of_split)
            text.append(f"  {title:22s}" + "".join(f"{100 * value:8.1f}" for value in values))
        ranges = f"{metrics.level_text()} ranges over classes"
        text.append(f"  {trained} minus frozen, {ranges}: {'; '.join(map(str, of_split))}")
    if (worse := _decisive(run, rows)).is_worse:
        command = f"dmljax export {shlex.quote(str(workdir))} --allow-worse --out=run.bundle"
        advice = bundle_advice(run.start_folder, run.weights)
        text.append(f"{worse.worse_text}: {advice}, and `{command}` makes one of this run")
    return text


def bundle_advice(start: str | None, weights: str | None) -> str:
    """Returns advice on a bundle of the frozen backbone of a run with these fields."""
    weights = method.first_weights(start, weights)
    if weights is None:
        return "`dmljax export` makes no bundle of the backbone as it is without a file of weights"
    name = identify(weights) if os.path.isfile(weights) else None
    command = f"dmljax export --net={name or 'NAME'} --weights={shlex.quote(weights)}"
    return f"`{command} --out=frozen.bundle` makes a bundle of the backbone as it is"


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
    test_embeddings: Mapping[str, np.ndarray],
    evaluator: Evaluator,
    *,
    allow_worse: bool,
) -> list[Against]:
    """Compares a run with its frozen backbone; raises if it is worse, unless `allow_worse`.

    Scores of the backbone that the run did not write are computed from its weights.
    """
    if run.weights is None and run.options.start is None:
        return []
    embeddings = {"test": test_embeddings[MAIN]}
    if run.held_out:  # neither None nor without images
        embeddings["val"] = evaluator.embeddings(state, run.held_out)[MAIN]
    try:
        scores = {
            split: folder.query_scores(run, x, workdir, split=split, step=int(state.step))
            for split, x in embeddings.items()
        }
        rows = compare(run, workdir, scores, evaluator)
        worst = _decisive(run, rows)
        if worst.is_missing:
            raise ValueError(f"{worst.name} is not a number")
    except (OSError, ValueError) as error:
        if allow_worse:
            return []
        raise ValueError(
            f"the run cannot be compared with the backbone that it started from: {error}. To "
            "export it without this comparison: --allow-worse"
        ) from error
    if worst.is_worse and not allow_worse:
        raise ValueError(
            f"{worst.worse_text}. To export it all the same: --allow-worse; "
            f"{bundle_advice(run.start_folder, run.weights)}"
        )
    return rows
