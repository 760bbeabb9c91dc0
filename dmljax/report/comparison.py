"""Two and more runs on the same test set, compared by the scores of their queries."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from dmljax import metrics
from dmljax.metrics import Comparison, McNemar
from dmljax.report import scores_file
from dmljax.report.scores_file import QueryScores

__all__ = [
    "ClassChange",
    "RunComparison",
    "RunScore",
    "class_changes",
    "compare_runs",
    "p_text",
]


class RunScore(NamedTuple):
    """A score of one run with its range over classes, and its comparison with the first run.

    `comparison` is None for the first run itself. With three runs and more, its p-value is adjusted
    by Holm, and the verdict follows the adjusted p-value.
    """

    mean: float
    low: float
    high: float
    comparison: Comparison | None


class RunComparison(NamedTuple):
    """`scores[score][run]`, and of each run but the first, McNemar's test of R@1.

    `range_note` says why a range is rough or missing; it is empty otherwise.
    """

    runs: tuple[str, ...]
    scores: dict[str, dict[str, RunScore]]
    mcnemar: dict[str, McNemar]
    queries: int
    classes: int
    range_note: str

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader needs to know about the numbers, one sentence each."""
        sentences = [
            f"{self.queries:,} queries of {self.classes:,} classes.",
            "Ranges are 95 % bootstrap intervals over classes. Differences are paired by query. A "
            "difference is not resolved if its range contains 0.",
        ]
        if len(self.runs) > 2:
            sentences.append("Each run is compared with the first; Holm adjusts the p-values.")
        if self.range_note:
            sentences.append(f"{self.range_note[0].upper()}{self.range_note[1:]}.")
        sentences.append(
            "Two trained nets are compared, not two methods: no range contains the spread over "
            "training seeds. To compare methods, train several seeds of each (dmljax study run)."
        )
        return tuple(sentences)

    def mcnemar_note(self, name: str, *, shown_fn: Callable[[str], str] = str) -> str:
        """The queries that are right in one of two runs only, with McNemar's test."""
        test = self.mcnemar[name]
        return (
            f"R@1: {test.only_first:,} queries are right only in {shown_fn(name)}, "
            f"{test.only_second:,} only in {shown_fn(self.runs[0])} (McNemar's test, which takes "
            f"queries as independent: p {p_text(test.p)})."
        )


def compare_runs(runs: Mapping[str, QueryScores]) -> RunComparison:
    """Compares every run with the first one; refuses runs on different test sets.

    The differences are paired by query and drawn by class; see `metrics.compare`.
    """
    names = tuple(runs)
    if len(names) < 2:
        raise ValueError(f"comparing needs two runs, not {len(names)}")
    first = runs[names[0]]
    for name in names[1:]:
        if reasons := scores_file.differences(first, runs[name]):
            raise ValueError(
                f"{names[0]} and {name} cannot be compared, because their test sets differ in "
                f"{', and in '.join(reasons)}"
            )
    scores: dict[str, dict[str, RunScore]] = {}
    for score, values in first.values.items():
        rows, comparisons = {}, {}
        for name in names:
            run_values = runs[name].values[score]
            low, high = metrics.interval(run_values, groups=first.labels)
            mean = float(np.nanmean(run_values)) if not np.isnan(run_values).all() else np.nan
            rows[name] = mean, low, high
            if name != names[0]:
                comparisons[name] = metrics.compare(run_values, values, groups=first.labels)
        comparisons = _adjusted(comparisons)
        scores[score] = {name: RunScore(*rows[name], comparisons.get(name)) for name in names}
    return RunComparison(
        runs=names,
        scores=scores,
        mcnemar={
            name: metrics.mcnemar(runs[name].recall_at_1 == 1, first.recall_at_1 == 1)
            for name in names[1:]
        },
        queries=int((first.first > 0).sum()),
        classes=len(np.unique(first.labels[first.first > 0])),
        range_note=metrics.interval_note(first.labels[first.first > 0]),
    )


def _adjusted(comparisons: dict[str, Comparison]) -> dict[str, Comparison]:
    """P-values adjusted for the number of runs, and verdicts that agree with them."""
    p_values = [comparison.p for comparison in comparisons.values()]
    if len(p_values) < 2 or np.isnan(p_values).any():
        return comparisons
    adjusted = {}
    for p, (name, comparison) in zip(metrics.holm(p_values), comparisons.items(), strict=True):
        verdict = comparison.verdict if p <= 1 - 0.95 else "not resolved"
        adjusted[name] = comparison._replace(p=float(p), verdict=verdict)
    return adjusted


class ClassChange(NamedTuple):
    """The queries of one class that are right in one of two runs only, and all its queries."""

    name: str
    change: float
    only_first: np.ndarray
    only_second: np.ndarray
    queries: int


def class_changes(a: QueryScores, b: QueryScores) -> list[ClassChange]:
    """The classes whose R@1 changes from run `a` to run `b`, the largest change first."""
    if reasons := scores_file.differences(a, b):
        raise ValueError(f"the test sets differ in {', and in '.join(reasons)}")
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


def p_text(p: float) -> str:
    """A p-value for a reader: '0.012', '< 0.001', or '-' where there is none."""
    return "-" if math.isnan(p) else "< 0.001" if p < 0.001 else f"{p:.3f}"
