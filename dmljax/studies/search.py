"""The trials of a search, and the best of them by its held-out score."""

import math
from typing import Any

from dmljax.files.result import Result, first_best
from dmljax.studies import outcomes, plan
from dmljax.studies.folder import Session


def values(session: Session) -> dict[int, float | None]:
    """The held-out value of every trial drawn in advance; None while it is not finished."""
    results: dict[str, list[Result | None]] = {}
    for run in session.folder.planned():
        results.setdefault(run.row, []).append(session.outcome(run).result)
    numbers: dict[int, float | None] = {}
    for i in range(session.search.trials):
        trial_results = results.get(plan.trial_name(i), [])
        finished = [result for result in trial_results if result is not None]
        is_complete = finished and len(finished) == len(trial_results)
        numbers[i] = outcomes.mean_score(finished, session.search.score) if is_complete else None
    return numbers


def is_over(session: Session) -> bool:
    """Whether all runs of all trials are over."""
    if not session.search.enumerated:
        from dmljax.studies import engine

        return engine.is_over(session)
    names = {plan.trial_name(i) for i in range(session.search.trials)}
    runs = [run for run in session.folder.planned() if run.row in names]
    return {run.row for run in runs} == names and all(session.outcome(run).is_over for run in runs)


def best_overrides(session: Session) -> dict[str, Any]:
    """The overrides of the best trial, the first of equals."""
    if session.search.enumerated:
        numbers = {i: v for i, v in values(session).items() if v is not None and not math.isnan(v)}
        best = first_best(numbers)
        point = None if best is None else plan.enumerated_points(session.search)[best]
    else:
        from dmljax.studies import engine

        point = engine.best_point(session)
    if point is None:
        raise ValueError("no trial of the search is finished, so none can be chosen")
    return dict(point)
