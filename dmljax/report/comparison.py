"""Two and more runs on the same test set, compared by the scores of their queries."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dmljax import metrics
from dmljax.config import fields as config_fields
from dmljax.config import files as config_files
from dmljax.files import reading
from dmljax.hints import counted
from dmljax.metrics.significance import LEVEL, Comparison, McNemar, level_text
from dmljax.report import scores_file
from dmljax.report.scores_file import QueryScores


class RunScore(NamedTuple):
    """A score of one run with its range over classes, and its comparison with the first run.

    `comparison` is None for the first run itself. With three or more runs, Holm adjusts its
    p-value, and the verdict follows the adjusted p-value.
    """

    mean: float
    low: float
    high: float
    comparison: Comparison | None


def worse_text(score: str, values: Sequence[Any], *, baseline: str, where: str = "") -> str:
    """Tells how much a score is worse than that of a baseline.

    `values` are the score, that of the baseline, their difference, and the ends of its range, which
    may be None or NaN.
    """
    value, reference, difference, low, high = values
    interval = ""
    if low is not None and high is not None and not math.isnan(low):
        interval = f" [{-100 * high:.1f}, {-100 * low:.1f}]"
    scores = f"{score} {100 * value:.1f} against {100 * reference:.1f}"
    return f"worse than {baseline} by {-100 * difference:.1f}{interval}{where} ({scores})"


class RunComparison(NamedTuple):
    """Scores of several runs, `scores[score][run]`, and McNemar's tests of R@1.

    `runs` are the scores of the queries by the name of the run, and `configs` the configs of the
    runs. `range_note` tells why a range is rough or missing; it is empty otherwise. Scores are
    means over `average`, 'queries' or 'classes'. `rank_note` names the distance that ranks items;
    it is empty for runs.
    """

    runs: Mapping[str, QueryScores]
    configs: Mapping[str, Mapping[str, Any]]
    scores: dict[str, dict[str, RunScore]]
    mcnemar: dict[str, McNemar]
    queries: int
    classes: int
    range_note: str
    average: str
    rank_note: str = ""

    @property
    def first(self) -> str:
        """The name of the run that the others are compared with."""
        return next(iter(self.runs))

    @property
    def field_rows(self) -> list[list[str]]:
        """One row per field that can change a result and differs: its name, its value in each run.

        A value is JSON, or empty where a run does not have the field.
        """
        configs = [config_fields.essential(x) if x else {} for x in self.configs.values()]
        differences = (config_files.differences(configs[0], other) for other in configs[1:])
        names = dict.fromkeys(name for fields in differences for name, *_ in fields)
        return [[name, *(_field(config, name) for config in configs)] for name in names]

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that explain the numbers."""
        sentences = [
            f"{self.queries:,} queries of {counted(self.classes, 'class')}.",
            f"Ranges are {level_text()} bootstrap intervals over classes. Differences are paired "
            "by query. A difference is not resolved if its range contains 0.",
        ]
        if self.average == "classes":
            sentences.append("Scores are means over classes of the mean of a class's queries.")
        if len(self.runs) > 2:
            sentences.append("Each run is compared with the first; Holm adjusts the p-values.")
        if self.range_note:
            sentences.append(f"{self.range_note[0].upper()}{self.range_note[1:]}.")
        if self.rank_note:
            sentences.append(self.rank_note)
        if any(self.configs.values()):
            sentences.append(
                "Two trained nets are compared, not two methods: no range contains the spread over "
                "training seeds. To compare methods, train several seeds of each (dmljax study "
                "run)."
            )
        return tuple(sentences)

    def worse_note(self, name: str) -> str:
        """Tells how much the run `name` is worse than the first, a baseline; "" if it is not."""
        baseline, row = self.scores["MAP@R"][self.first], self.scores["MAP@R"][name]
        compared = row.comparison
        if compared is None or not compared.difference < 0:
            return ""
        values = row.mean, baseline.mean, compared.difference, compared.low, compared.high
        return worse_text("MAP@R", values, baseline="the baseline")

    def mcnemar_note(self, name: str, *, shown_fn: Callable[[str], str] = str) -> str:
        """Counts the queries that are right in one of two runs only, with McNemar's test."""
        test = self.mcnemar[name]
        return (
            f"R@1: {test.only_first:,} of the queries are right only in {shown_fn(name)}, and "
            f"{test.only_second:,} only in {shown_fn(self.first)} (McNemar's test, which takes "
            f"queries as independent: p {p_text(test.p)})."
        )


def read(folders: Mapping[str, str | os.PathLike]) -> RunComparison:
    """Compares runs by the files in their folders, `{display name: folder}`."""
    configs = {name: reading.config_of_run(folder) for name, folder in folders.items()}
    averages = {name: _average(config) for name, config in configs.items()}
    if len(set(averages.values())) > 1:
        text = ", ".join(f"{name} over {average}" for name, average in averages.items())
        raise ValueError(
            f"runs must average scores in the same way, got {text}: compare runs with the same "
            "evaluate.average"
        )
    scores = {name: scores_file.read(folder) for name, folder in folders.items()}
    return compare_runs(scores, configs=configs, average=next(iter(averages.values())))


def _average(config: Mapping[str, Any]) -> str:
    return (config.get("evaluate") or {}).get("average", "queries")


def compare_runs(
    runs: Mapping[str, QueryScores],
    *,
    configs: Mapping[str, Mapping[str, Any]] | None = None,
    average: str = "queries",
) -> RunComparison:
    """Compares every run with the first one; refuses runs on different test sets.

    Scores are means over the queries, or `average="classes"` over classes. The differences are
    paired by query and drawn by class; see `metrics.compare`.
    """
    names = tuple(runs)
    if len(names) < 2:
        raise ValueError(f"a comparison needs two runs, got {len(names)}")
    first = runs[names[0]]
    for name in names[1:]:
        if reason := scores_file.difference(first, runs[name]):
            raise ValueError(
                f"{names[0]} and {name} cannot be compared: their test sets differ in {reason}"
            )
    scores: dict[str, dict[str, RunScore]] = {}
    for score, values in first.values.items():
        of_runs = {name: runs[name].values[score] for name in names}
        comparisons = {
            name: metrics.compare(of_runs[name], values, groups=first.labels, over=average)
            for name in names[1:]
        }
        comparisons = _adjusted(comparisons)
        scores[score] = {}
        for name, run_values in of_runs.items():
            low, high = metrics.interval(run_values, groups=first.labels, over=average)
            mean = metrics.average(run_values, first.labels, over=average)
            scores[score][name] = RunScore(mean, low, high, comparisons.get(name))
    return RunComparison(
        runs=runs,
        configs=configs or {name: {} for name in names},
        scores=scores,
        mcnemar={
            name: metrics.mcnemar(runs[name].recall_at_1 == 1, first.recall_at_1 == 1)
            for name in names[1:]
        },
        queries=int((first.first > 0).sum()),
        classes=len(np.unique(first.labels[first.first > 0])),
        range_note=metrics.interval_note(first.labels[first.first > 0]),
        average=average,
    )


def _adjusted(comparisons: dict[str, Comparison]) -> dict[str, Comparison]:
    """Adjusts p-values for the number of runs, and the verdicts with them."""
    p_values = [comparison.p for comparison in comparisons.values()]
    if len(p_values) < 2 or np.isnan(p_values).any():
        return comparisons
    adjusted = {}
    for p, (name, comparison) in zip(metrics.holm(p_values), comparisons.items(), strict=True):
        verdict = comparison.verdict if p <= 1 - LEVEL else "not resolved"
        adjusted[name] = comparison._replace(p=float(p), verdict=verdict)
    return adjusted


class ClassChange(NamedTuple):
    """The queries of one class that are right in only one of two runs, and its query count."""

    name: str
    change: float
    only_first: np.ndarray
    only_second: np.ndarray
    queries: int


def class_changes(a: QueryScores, b: QueryScores) -> list[ClassChange]:
    """Returns the classes whose R@1 changes from run `a` to run `b`, the largest change first."""
    is_scored = a.first > 0
    changed = np.flatnonzero(is_scored & ((a.first == 1) != (b.first == 1)))
    sizes = np.bincount(a.labels[is_scored], minlength=len(a.classes))
    changes = []
    for label in np.unique(a.labels[changed]):
        rows = changed[a.labels[changed] == label]
        only_first, only_second = (a.queries[rows[x.first[rows] == 1]] for x in (a, b))
        size = int(sizes[label])
        change = (len(only_second) - len(only_first)) / size
        changes.append(ClassChange(a.classes[label], change, only_first, only_second, size))
    return sorted(changes, key=lambda c: (-abs(c.change), c.name))


def _field(config: Any, path: str) -> str:
    for name in path.split("."):
        config = config.get(name) if isinstance(config, dict) else None
    return "" if config is None else json.dumps(config)


def p_text(p: float) -> str:
    """Formats a p-value: '0.012', '< 0.001', or '-' for NaN."""
    return "-" if math.isnan(p) else "< 0.001" if p < 0.001 else f"{p:.3f}"
