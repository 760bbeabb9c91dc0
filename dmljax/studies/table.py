"""Outcomes as a table: means, intervals, differences to the baseline, and conclusions.

Values are in percent; `printing` shows them.
"""

import math
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from dmljax import metrics
from dmljax.files.run_folder import Result, first_best
from dmljax.hints import counted, shown_duration
from dmljax.metrics.significance import LEVEL, Difference, Estimate
from dmljax.studies.outcomes import Outcome
from dmljax.studies.plan import PlannedRun
from dmljax.studies.study_file import Row, Study, score_key, varies


class Cell(NamedTuple):
    """One score of one row: a value for every seed (or fold) that is finished, in order."""

    values: Mapping[tuple[int, int | None], float]  # by seed and fold
    estimate: Estimate | None


class Comparison(NamedTuple):
    """A row against its baseline: `p` is adjusted for the number of comparisons (Holm).

    Without a spread between the runs nothing is tested: `p` and the interval are NaN.

    With `less_is_better`, a difference below 0 is the better one; `wins` counts the better values.
    """

    difference: Difference
    p: float
    wins: int
    pairs: int
    less_is_better: bool = False

    @property
    def is_tested(self) -> bool:
        return not math.isnan(self.p)

    @property
    def is_resolved(self) -> bool:
        return self.p <= 1 - LEVEL and not self.difference.low <= 0 <= self.difference.high

    @property
    def is_better(self) -> bool:
        return self.is_resolved and (self.difference.mean < 0) == self.less_is_better


class TableRow(NamedTuple):
    """One row of the table.

    `finished` counts finished runs among the `planned` ones, and `failures` says why runs failed.
    `test_chosen`: test scores had a part in choosing the step, out of `candidates` evaluations.
    """

    name: str
    cells: Mapping[str, Cell]
    planned: int
    finished: int
    failures: tuple[str, ...]
    running: int
    test_chosen: bool
    candidates: int
    rules: tuple[str, ...]
    collapsed: int
    published: Mapping[str, float | str]
    comparisons: Mapping[str, Comparison]

    @property
    def is_complete(self) -> bool:
        return self.finished == self.planned


class Table(NamedTuple):
    study: Study
    rows: tuple[TableRow, ...]
    notes: tuple[str, ...]  # what the numbers allow to conclude
    provenance: tuple[str, ...]
    raw: tuple[dict[str, Any], ...]  # one for every run


class Run(NamedTuple):
    """A planned run with its outcome and the config of its folder."""

    planned: PlannedRun
    outcome: Outcome
    config: Mapping[str, Any] | None = None


_MOST = 3  # values that a line of the footer lists
_Unit = tuple[int, int | None]  # seed and fold
_Scores = Mapping[str, float | None]


def make(study: Study, runs: Iterable[Run]) -> Table:
    """Returns the table of a study."""
    by_row: dict[str, list[Run]] = {}
    for run in runs:
        by_row.setdefault(run.planned.row, []).append(run)
    visible_rows = [row for row in study.rows if row.name not in study.candidates]
    rows = _compared(study, [_row(study, row, by_row) for row in visible_rows])
    return Table(
        study=study,
        rows=tuple(rows),
        notes=tuple(_notes(study, rows)),
        provenance=tuple(_provenance(study, [r for runs in by_row.values() for r in runs])),
        raw=tuple(_raw(study, by_row)),
    )


def chosen_scores(
    result: Result, rule: str | None, *, reloads: bool = False
) -> tuple[_Scores, bool, int]:
    """Returns the scores of a run by a rule, whether it reads test scores, and its candidates.

    `rule` is None for the choice of the run itself, 'last', or a score such as 'val/MAP@R', whose
    first best evaluation counts. A run that `reloads` its best step by test scores has read them,
    whatever the rule. The last value is the number of evaluations that the rule chooses from.
    """
    chosen = result.chosen
    assert chosen is not None, "only finished runs have scores"
    if rule is None:
        return result.scores, chosen.uses_test, chosen.candidates
    has_read_test = reloads and chosen.uses_test
    evaluations = [e for e in result.evaluations if e.step]
    if rule == "last":
        return evaluations[-1].scores, has_read_test, 1
    key = score_key(rule)
    values = [(e.scores.get(key), e) for e in evaluations]
    scored = [(value, e) for value, e in values if value is not None]
    if not scored:
        names = sorted({name for e in evaluations for name in e.scores})
        raise ValueError(f"choose={rule!r}: no evaluation has this score; they have {names}")
    sign = -1 if key.rpartition("/")[2] in metrics.LESS_IS_BETTER else 1
    best = first_best({e.step: sign * value for value, e in scored})
    scores = next(e.scores for e in evaluations if e.step == best)
    return scores, has_read_test or key.startswith("test/"), len(scored)


def _row(study: Study, row: Row, by_row: Mapping[str, list[Run]]) -> TableRow:
    has_own_runs = row.runs_of is None or row.join is not None
    origin = row if has_own_runs else study.row(row.runs_of or "")
    runs = by_row.get(origin.name, [])
    folds = 1 if study.folds is None or row.join else study.folds
    results = {run.planned.key[1:]: run.outcome.result for run in runs if run.outcome.result}
    reloads = {run.planned.key[1:]: bool((run.config or {}).get("reload_best_at")) for run in runs}
    picked = {
        unit: chosen_scores(result, row.choose, reloads=reloads[unit])
        for unit, result in sorted(results.items())
    }
    rules = {result.chosen.rule for result in results.values() if result.chosen}
    cells = {}
    for score in study.scores:
        numbers = {unit: scores.get(score_key(score)) for unit, (scores, _, _) in picked.items()}
        values = {unit: 100 * value for unit, value in numbers.items() if value is not None}
        if folds > 1 and study.test != "folds":
            values = _means_over_folds(values, folds)
        estimate = metrics.student_interval(list(values.values())) if values else None
        cells[score] = Cell(values, estimate)
    failed = [run for run in runs if run.outcome.has_failed]
    return TableRow(
        name=row.name,
        cells=cells,
        planned=len(study.seeds_of(origin)) * folds,
        finished=len(results),
        failures=tuple(f"{run.planned.title}: {run.outcome.message}" for run in failed),
        running=sum(run.outcome.state == "running" for run in runs),
        test_chosen=any(uses_test for _, uses_test, _ in picked.values()),
        candidates=max((count for _, _, count in picked.values()), default=0),
        rules=(row.choose,) if row.choose else tuple(sorted(rules)),
        collapsed=sum(
            (scores.get(score_key(score)) or 0) < limit
            for score, limit in study.collapsed.items()
            for scores, _, _ in picked.values()
        ),
        published=study.published.get(row.name, {}),
        comparisons={},
    )


def _means_over_folds(values: Mapping[_Unit, float], folds: int) -> dict[_Unit, float]:
    """Returns the mean over the folds of each seed whose folds are all finished."""
    seeds: dict[int, list[float]] = {}
    for (seed, _), value in values.items():
        seeds.setdefault(seed, []).append(value)
    return {(s, None): float(np.mean(v)) for s, v in seeds.items() if len(v) == folds}


def _compared(study: Study, rows: list[TableRow]) -> list[TableRow]:
    """Returns the rows with their comparisons, each to its baseline."""
    cells_of = {row.name: row.cells for row in rows}
    for score in filter(varies, study.scores):
        differences = {}
        for i, row in enumerate(rows):
            baseline = study.row(row.name).baseline
            if baseline is not None:
                compared = _difference(study, score, row.cells[score], cells_of[baseline][score])
                if compared is not None:
                    differences[i] = compared
        adjusted = metrics.holm([comparison.p for comparison in differences.values()])
        for (i, comparison), p in zip(differences.items(), adjusted, strict=True):
            comparisons = {**rows[i].comparisons, score: comparison._replace(p=p)}
            rows[i] = rows[i]._replace(comparisons=comparisons)
    return rows


def less_is_better(study: Study, score: str) -> bool:
    """Returns whether a lower value of a column is the better one."""
    name = score_key(score).rpartition("/")[2]
    return score in study.less_is_better or name in metrics.LESS_IS_BETTER


def _difference(study: Study, score: str, cell: Cell, other: Cell) -> Comparison | None:
    """Computes the difference by the test of the study; its p-value is not adjusted."""
    shared = [unit for unit in cell.values if unit in other.values]
    a, b = [cell.values[u] for u in shared], [other.values[u] for u in shared]
    less = less_is_better(study, score)
    wins = sum((x < y) if less else (x > y) for x, y in zip(a, b, strict=True))
    if study.test == "welch":
        if min(len(cell.values), len(other.values)) < 2:
            return None
        difference = metrics.welch_difference(
            list(cell.values.values()), list(other.values.values())
        )
    elif len(shared) < 2:
        return None
    elif study.test == "folds":
        difference = metrics.fold_difference(a, b, test_per_train=1 / ((study.folds or 2) - 1))
    else:
        difference = metrics.paired_difference(a, b)
    return Comparison(difference, difference.p, wins, len(shared), less)


def visible(table_rows: Sequence[TableRow], study: Study, score: str) -> str | None:
    """Returns a sentence about the smallest difference in a score that the study can see."""
    compared = [row.comparisons[score] for row in table_rows if score in row.comparisons]
    compared = [comparison for comparison in compared if comparison.is_tested]
    if not compared or study.test == "folds":
        return None
    n = min(c.difference.n for c in compared)
    deviation = math.sqrt(np.mean([c.difference.deviation**2 for c in compared]))
    paired = study.test == "paired"
    see_fn = partial(metrics.visible_difference, deviation, n=n, paired=paired)
    of_what = f"sd {_number(deviation)}{' of the paired differences' if paired else ''}"
    points = see_fn()
    sentence = f"{score}: with n = {n} and {of_what} this study can see {_number(points)} points"
    if len(compared) > 1:
        first = see_fn(comparisons=len(compared))
        sentence += f" ({_number(first)} for the first of {len(compared)} rows)"
    return sentence + "."


def _number(value: float) -> str:
    return f"{value:.1f}" if value >= 0.095 else f"{value:.2f}"


def _notes(study: Study, rows: Sequence[TableRow]) -> Iterable[str]:
    if study.test is not None:
        yield from filter(None, (visible(rows, study, score) for score in study.scores))
    has_values = any(cell.values for row in rows for cell in row.cells.values())
    if study.folds and study.test != "folds" and has_values:
        yield (
            "Intervals are over repetitions with other seeds; they hold for these folds and these "
            "classes."
        )
    for row in study.rows:
        if row.best_of:
            yield (
                f"{row.name}: the settings of the best of {len(row.best_of)} trials, by {row.by}; "
                "the score of that trial itself is not reported."
            )
    most = max((row.candidates for row in rows if row.test_chosen), default=0)
    if most > 1:
        gain = metrics.expected_best(most)
        yield (
            f"†: the step was chosen on the test classes, among {most} evaluations. The best of "
            f"{most} independent equal evaluations gains {gain:.1f} standard deviations by choice."
        )


def _provenance(study: Study, all_runs: Sequence[Run]) -> Iterable[str]:
    results = [r.outcome.result for r in all_runs if r.outcome.result and r.planned.config]
    count = counted(len(results), "finished run")
    yield f"Study {study.source}, digest {study.digest[:12]}; {count}."
    if not results:
        return

    def listed(text_fn: Callable[[Result], str]) -> str:
        values = sorted({text_fn(result) for result in results})
        more = f" and {len(values) - _MOST} others" if len(values) > _MOST else ""
        return " | ".join(values[:_MOST]) + more

    def data(r: Result) -> str:
        images, classes = r.data["test"]["images"], r.data["test"]["classes"]
        digest = (r.digests["data"] or "")[:12]
        return f"{digest} (test {images:,} images of {classes:,} classes)"

    def weights(r: Result) -> str:
        # People send tables to others, so that no table has a path.
        name = pathlib.PurePath(r.pretraining).name if r.pretraining else "none"
        digest = r.digests.get("weights")
        return f"{name} ({digest[:12]})" if digest else name

    def code(r: Result) -> str:
        if r.code is None:
            return "an installed package"
        return r.code["revision"][:12] + (" with changes (dirty)" if r.code["dirty"] else "")

    steps = listed(lambda r: f"{r.steps:,}")
    yield f"Steps: {steps}. Data: {listed(data)}. Pretraining: {listed(weights)}."
    devices = listed(lambda r: f"{r.devices['count']} x {r.devices['kind']}")
    versions = listed(lambda r: f"jax {r.versions.get('jax')}")
    seconds = shown_duration(sum(r.wall_seconds for r in results))
    yield f"Code: {listed(code)}, {versions}; devices: {devices}; {seconds} of runs."


def _raw(study: Study, by_row: Mapping[str, Sequence[Run]]) -> Iterable[dict[str, Any]]:
    """Yields a record of every run: its name, its state, and all of its scores."""
    for name, runs in by_row.items():
        for run in sorted(runs, key=lambda r: (r.planned.seed, r.planned.fold or 0)):
            line = {x: getattr(run.planned, x) for x in ("row", "seed", "fold", "digest")}
            line |= {"state": run.outcome.state, "message": run.outcome.message}
            if (result := run.outcome.result) is not None and result.chosen is not None:
                line |= {"step": result.chosen.step, "rule": result.chosen.rule}
                line |= {"test_chosen": result.chosen.uses_test}
                line |= {"candidates": result.chosen.candidates}
                line |= {"wall_seconds": round(result.wall_seconds, 1)}
                line |= {  # test scores of the best of many are biased
                    score: value
                    for score, value in result.scores.items()
                    if name not in study.candidates or not score.startswith("test/")
                }
            yield line
