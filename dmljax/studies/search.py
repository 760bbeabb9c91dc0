"""The trials of a search, and the best of them by its held-out score."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dmljax.studies import outcomes, plan
from dmljax.studies.study_file import Row, Search

__all__ = ["is_over", "row_of_trial", "trial_value", "values", "winner"]


def row_of_trial(search: Search, number: int, point: Mapping[str, Any]) -> Row:
    """A trial as a row: the overrides of the search, and its point."""
    overrides = {**search.overrides, **point}
    return Row(plan.trial_name(number), search.config, overrides, seeds=search.seeds)


def trial_value(results: Sequence[Mapping[str, Any]], score: str) -> float:
    """The value of a trial: the mean of its held-out score over its seeds and folds."""
    numbers = [result["scores"].get(score) for result in results]
    if any(number is None for number in numbers):
        names = ", ".join(sorted(results[0]["scores"]))
        raise ValueError(f"search.score: a trial has no {score!r}; its scores are {names}")
    return float(np.mean(numbers))


def values(session: Any) -> dict[int, float | None]:
    """The value of every trial drawn in advance, or None. Reads no test score."""
    options, folder = session.study.search, session.folder
    runs_by_row: dict[str, list[plan.PlannedRun]] = {}
    for run in folder.planned():
        runs_by_row.setdefault(run.row, []).append(run)
    numbers: dict[int, float | None] = {}
    for i in range(options.trials):
        runs = runs_by_row.get(plan.trial_name(i), [])
        states = [outcomes.outcome(folder.run_folder(run.digest)) for run in runs]
        is_finished = runs and all(state.state == "finished" for state in states)
        results = [state.result for state in states]
        numbers[i] = trial_value(results, options.score) if is_finished else None
    return numbers


def is_over(session: Any) -> bool:
    """Whether all runs of all trials are over."""
    options, folder = session.study.search, session.folder
    if not options.enumerated:
        from dmljax.studies import engine

        return engine.is_over(session)
    names = {plan.trial_name(i) for i in range(options.trials)}
    runs = [run for run in folder.planned() if run.row in names]
    return {run.row for run in runs} == names and all(
        outcomes.outcome(folder.run_folder(run.digest)).is_over for run in runs
    )


def winner(session: Any) -> dict[str, Any]:
    """The overrides of the best trial, the first of equals."""
    options = session.study.search
    if options.enumerated:
        numbers = {i: v for i, v in values(session).items() if v is not None and not math.isnan(v)}
        best = max(numbers, key=lambda i: (numbers[i], -i), default=None)
        point = None if best is None else plan.enumerated_points(options)[best]
    else:
        from dmljax.studies import engine

        point = engine.best_point(session)
    if point is None:
        raise ValueError("no trial of the search is finished, so none can be chosen")
    return dict(point)
