"""The trials of a search, and the best of them by its held-out score."""

from __future__ import annotations

import math
from typing import Any

from dmljax.files.result import first_best
from dmljax.studies import outcomes, plan
from dmljax.studies.folder import Session
from dmljax.studies.study_file import Search

__all__ = ["best_overrides", "is_over", "search_of", "values"]


def search_of(session: Session) -> Search:
    """The search of a study that has one."""
    assert session.study.search is not None
    return session.study.search


def values(session: Session) -> dict[int, float | None]:
    """The held-out value of every trial drawn in advance; None while it is not finished."""
    search, folder = search_of(session), session.folder
    runs_by_row: dict[str, list[plan.PlannedRun]] = {}
    for run in folder.planned():
        runs_by_row.setdefault(run.row, []).append(run)
    numbers: dict[int, float | None] = {}
    for i in range(search.trials):
        runs = runs_by_row.get(plan.trial_name(i), [])
        results = [outcomes.outcome(folder.run_folder(run.digest)).result for run in runs]
        finished = [result for result in results if result is not None]
        is_complete = runs and len(finished) == len(runs)
        numbers[i] = outcomes.mean_score(finished, search.score) if is_complete else None
    return numbers


def is_over(session: Session) -> bool:
    """Whether all runs of all trials are over."""
    search, folder = search_of(session), session.folder
    if not search.enumerated:
        from dmljax.studies import engine

        return engine.is_over(session)
    names = {plan.trial_name(i) for i in range(search.trials)}
    runs = [run for run in folder.planned() if run.row in names]
    return {run.row for run in runs} == names and all(
        outcomes.outcome(folder.run_folder(run.digest)).is_over for run in runs
    )


def best_overrides(session: Session) -> dict[str, Any]:
    """The overrides of the best trial, the first of equals."""
    search = search_of(session)
    if search.enumerated:
        numbers = {i: v for i, v in values(session).items() if v is not None and not math.isnan(v)}
        best = first_best(numbers)
        point = None if best is None else plan.enumerated_points(search)[best]
    else:
        from dmljax.studies import engine

        point = engine.best_point(session)
    if point is None:
        raise ValueError("no trial of the search is finished, so none can be chosen")
    return dict(point)
