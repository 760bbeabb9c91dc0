"""Outcomes as a table: means, intervals, differences to the baseline, and what they allow to say.

Everything here is plain numbers; `printing` and `page` print them. Values are in percent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dmljax import metrics
from dmljax.metrics import Difference, Estimate
from dmljax.studies.outcomes import Outcome
from dmljax.studies.plan import PlannedRun
from dmljax.studies.study_file import Row, Study, score_key

__all__ = [
    "Cell",
    "Comparison",
    "Table",
    "TableRow",
    "chosen_scores",
    "less_is_better",
    "make",
    "visible",
]

LEVEL = 0.95


class Cell(NamedTuple):
    """One score of one row: a value for every seed (or fold) that is finished, in order."""

    values: Mapping[tuple[int, int | None], float]  # by seed and fold
    estimate: Estimate | None

    @property
    def n(self) -> int:
        return len(self.values)


class Comparison(NamedTuple):
    """A row against its baseline: `p` is adjusted for the number of comparisons (Holm).

    With `less_is_better`, a difference below 0 is the better one; `wins` counts the better values.
    """

    difference: Difference
    p: float
    wins: int
    pairs: int
    less_is_better: bool = False

    @property
    def is_resolved(self) -> bool:
        return self.p <= 1 - LEVEL and not self.difference.low <= 0 <= self.difference.high

    @property
    def is_better(self) -> bool:
        return self.is_resolved and (self.difference.mean < 0) == self.less_is_better


class TableRow(NamedTuple):
    """`planned` runs, of which `finished` count, `failures` failed, and others are not made yet.

    Of those, `without_start` cannot be made, because the run that they start from failed.

    `test_chosen`: test scores had a part in choosing the step, out of `candidates` evaluations.
    """

    name: str
    cells: Mapping[str, Cell]
    planned: int
    finished: int
    failures: tuple[str, ...]
    running: int
    without_start: int
    test_chosen: bool
    candidates: int
    rules: tuple[str, ...]
    collapsed: int | None
    published: Mapping[str, float | str]
    comparisons: Mapping[str, Comparison]

    @property
    def is_complete(self) -> bool:
        return self.finished == self.planned


class Table(NamedTuple):
    study: Study
    rows: tuple[TableRow, ...]
    notes: tuple[str, ...]  # what may be concluded
    provenance: tuple[str, ...]
    raw: tuple[dict[str, Any], ...]  # one for every run

    @property
    def per_fold(self) -> bool:
        return self.study.test == "folds"


class _Run(NamedTuple):
    planned: PlannedRun
    outcome: Outcome
    config: Mapping[str, Any] | None  # of the run folder


def make(
    study: Study,
    runs: Iterable[tuple[PlannedRun, Outcome, Mapping[str, Any] | None]],
    *,
    joined: Mapping[tuple[str, int], Mapping[str, float]] | None = None,
) -> Table:
    """The table of a study. `joined`: scores of the joined embeddings of all folds of a row."""
    by_row: dict[str, list[_Run]] = {}
    for run in runs:
        by_row.setdefault(run[0].row, []).append(_Run(*run))
    rows = [_row(study, row, by_row, joined or {}) for row in study.rows]
    rows = _compared(study, rows)
    return Table(
        study=study,
        rows=tuple(rows),
        notes=tuple(_notes(study, rows)),
        provenance=tuple(_provenance(study, by_row)),
        raw=tuple(_raw(study, by_row)),
    )


def chosen_scores(
    result: Mapping[str, Any], rule: str | None, *, reloads: bool = False
) -> tuple[dict[str, float], bool, int]:
    """The scores of a run by a rule; whether it reads test scores; the number of candidates.

    `rule` is None for the choice of the run itself, 'last', or a score such as 'val/MAP@R', whose
    first best evaluation is taken. A run that `reloads` its best step by test scores has read them,
    whatever the rule.
    """
    chosen = result["chosen"]
    if rule is None:
        return result["scores"], chosen["uses_test"], chosen["candidates"]
    has_read_test = reloads and chosen["uses_test"]
    evaluations = [e for e in result["evaluations"] if e["step"]]
    if rule == "last":
        return evaluations[-1]["scores"], has_read_test, 1
    key = score_key(rule)
    scored = [e for e in evaluations if e["scores"].get(key) is not None]
    if not scored:
        names = sorted({name for e in evaluations for name in e["scores"]})
        raise ValueError(f"choose={rule!r}: no evaluation has this score; they have {names}")
    sign = -1 if key.rpartition("/")[2] in metrics.LESS_IS_BETTER else 1
    best = max(scored, key=lambda e: (sign * e["scores"][key], -e["step"]))
    return best["scores"], has_read_test or key.startswith("test/"), len(scored)


def _row(
    study: Study,
    row: Row,
    by_row: Mapping[str, list[_Run]],
    joined: Mapping[tuple[str, int], Mapping[str, float]],
) -> TableRow:
    runs = by_row.get(row.runs_of or row.name, [])
    origin = study.row(row.runs_of) if row.runs_of else row
    folds = study.folds or 1
    units = folds if study.test == "folds" and not row.join_folds else 1
    planned = len(study.seeds_of(origin)) * folds
    finished = [run for run in runs if run.outcome.state == "finished"]
    picked = {
        (run.planned.seed, run.planned.fold): chosen_scores(
            run.outcome.result,
            row.choose,
            reloads=bool((run.config or {}).get("reload_best_at")),
        )
        for run in finished
    }
    cells = {}
    for score in study.scores:
        if row.join_folds:
            of_seed = {
                (s, None): joined[row.runs_of, s]
                for s in study.seeds_of(origin)
                if (row.runs_of, s) in joined
            }
        else:
            of_seed = {key: scores for key, (scores, _, _) in picked.items()}
        key = score_key(score)
        values = {
            unit: 100 * scores[key]
            for unit, scores in of_seed.items()
            if scores.get(key) is not None
        }
        if study.folds and units == 1 and not row.join_folds:
            values = _means_over_folds(values, study.folds)
        values = dict(sorted(values.items()))
        estimate = metrics.student_interval(list(values.values())) if values else None
        cells[score] = Cell(values, estimate)
    collapsed = None
    for score, limit in study.collapsed.items():
        lower = [x for x in picked.values() if (x[0].get(score_key(score)) or 0) < limit]
        collapsed = (collapsed or 0) + len(lower)
    sentences = (run.outcome.result["chosen"] for run in finished)
    return TableRow(
        name=row.name,
        cells=cells,
        planned=planned,
        finished=len(finished),
        failures=tuple(
            f"{run.planned.title}: {run.outcome.message}"
            for run in runs
            if run.outcome.state in ("failed", "diverged")
        ),
        running=sum(run.outcome.state == "running" for run in runs),
        without_start=_without_start(study, origin, by_row),
        test_chosen=any(uses_test for _, uses_test, _ in picked.values()),
        candidates=max((count for _, _, count in picked.values()), default=0),
        rules=tuple(
            sorted(
                {row.choose}
                if row.choose
                else {f"{c['split']}/{c['score']}".replace("None/None", "last") for c in sentences}
            )
        ),
        collapsed=collapsed,
        published=study.published.get(row.name, {}),
        comparisons={},
    )


def _without_start(study: Study, row: Row, by_row: Mapping[str, Sequence[_Run]]) -> int:
    """How many runs of a row are not planned, because the run that they start from failed.

    The digest of such a run would contain the step that its start has chosen.
    """
    planned = {(run.planned.seed, run.planned.fold) for run in by_row.get(row.name, [])}
    failed: set[tuple[int, int | None]] = set()
    source = row
    while source.start_from is not None:
        source = study.row(source.start_from)
        failed |= {
            (run.planned.seed, run.planned.fold)
            for run in by_row.get(source.name, [])
            if run.outcome.state in ("failed", "diverged")
        }
    return sum(seed in study.seeds_of(row) for seed, _ in failed - planned)


def _means_over_folds(
    values: Mapping[tuple[int, int | None], float], folds: int
) -> dict[tuple[int, int | None], float]:
    """The mean over folds of every seed of which all folds are finished."""
    seeds: dict[int, list[float]] = {}
    for (seed, _), value in values.items():
        seeds.setdefault(seed, []).append(value)
    return {(s, None): float(np.mean(v)) for s, v in seeds.items() if len(v) == folds}


def _compared(study: Study, rows: list[TableRow]) -> list[TableRow]:
    """The rows with their comparisons, each to its baseline."""
    cells_of = {row.name: row.cells for row in rows}
    for score in study.scores:
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
    """Whether a lower value of a column is the better one."""
    name = score_key(score).rpartition("/")[2]
    return score in study.less_is_better or name in metrics.LESS_IS_BETTER


def _difference(study: Study, score: str, cell: Cell, other: Cell) -> Comparison | None:
    """The difference by the test of the study; its p-value is not adjusted."""
    shared = [unit for unit in cell.values if unit in other.values]
    a, b = [cell.values[u] for u in shared], [other.values[u] for u in shared]
    less = less_is_better(study, score)
    wins = sum((x < y) if less else (x > y) for x, y in zip(a, b, strict=True))
    if study.test == "welch":
        if cell.n < 2 or other.n < 2:
            return None
        difference = metrics.welch_difference(
            list(cell.values.values()), list(other.values.values())
        )
    elif len(shared) < 2:
        return None
    elif study.test == "folds":
        difference = metrics.fold_difference(a, b, test_per_train=1 / (study.folds - 1))
    else:
        difference = metrics.paired_difference(a, b)
    return Comparison(difference, difference.p, wins, len(shared), less)


def visible(table_rows: Sequence[TableRow], study: Study, score: str) -> str | None:
    """What differences in a score the study can see, as a sentence."""
    compared = [row.comparisons[score] for row in table_rows if score in row.comparisons]
    if not compared or study.test == "folds":
        return None
    n = min(c.difference.n for c in compared)
    deviation = math.sqrt(np.mean([c.difference.deviation**2 for c in compared]))
    see_fn = metrics.visible_difference
    of_what = f"sd {_number(deviation)}"
    if study.test == "paired":
        see_fn = metrics.visible_paired_difference
        of_what += " of the paired differences"
    points = see_fn(deviation, n=n)
    sentence = f"{score}: with n = {n} and {of_what} this study can see {_number(points)} points"
    if len(compared) > 1:
        first = see_fn(deviation, n=n, comparisons=len(compared))
        sentence += f" ({_number(first)} for the first of {len(compared)} rows)"
    return sentence + "."


def _number(value: float) -> str:
    return f"{value:.1f}" if value >= 0.095 else f"{value:.2f}"


def _correlation(rows: Sequence[TableRow], study: Study, score: str) -> float | None:
    """The mean correlation of seeds between rows and their baselines."""
    cells_of = {row.name: row.cells[score].values for row in rows}
    correlations = []
    for row in rows:
        values, baseline = row.cells[score].values, study.row(row.name).baseline
        others = cells_of.get(baseline or "", {})
        shared = [unit for unit in values if unit in others]
        if len(shared) < 3:
            continue
        a, b = [values[u] for u in shared], [others[u] for u in shared]
        if np.std(a) > 0 and np.std(b) > 0:
            correlations.append(float(np.corrcoef(a, b)[0, 1]))
    return float(np.mean(correlations)) if correlations else None


def _notes(study: Study, rows: Sequence[TableRow]) -> Iterable[str]:
    if study.test is not None:
        compared = {score for row in rows for score in row.comparisons}
        for score in study.scores:
            if sentence := visible(rows, study, score):
                yield sentence
        if study.test == "paired" and study.scores[0] in compared:
            correlation = _correlation(rows, study, study.scores[0])
            if correlation is not None:
                yield (
                    f"Correlation of seeds between rows in {study.scores[0]}: {correlation:.2f}; "
                    "pairing pays above 0.56 for 3 seeds, 0.28 for 5, 0.12 for 10."
                )
    if study.folds and study.test != "folds" and max(c.n for r in rows for c in r.cells.values()):
        yield (
            "Intervals are over repetitions with other seeds; they hold for these folds and these "
            "classes."
        )
    if study.search is not None:
        yield (
            f"Chosen by a {study.search.method} search of {study.search.trials} trials, by "
            f"{study.search.score}; the score of the best trial itself is not reported."
        )
    counts = {row.candidates for row in rows if row.candidates}
    if any(row.test_chosen for row in rows) and len(counts) > 1:
        yield f"Rows were chosen from different numbers of evaluations: {sorted(counts)}."
    most = max((row.candidates for row in rows if row.test_chosen), default=0)
    if most > 1:
        gain = metrics.expected_best(most)
        yield (
            f"†: the step was chosen on the test classes, among {most} evaluations. The best of "
            f"{most} independent equal evaluations gains {gain:.1f} deviations by the choice alone."
        )


def _provenance(study: Study, by_row: Mapping[str, Sequence[_Run]]) -> Iterable[str]:
    runs = [r for some in by_row.values() for r in some if r.outcome.state == "finished"]
    results = [run.outcome.result for run in runs]
    configs = [run.config for run in runs if run.config]
    yield f"Study {study.source}, digest {study.digest[:12]}; {len(runs)} finished runs."
    if not runs:
        return
    parts = [
        ("steps", {f"{r['steps']:,}" for r in results}),
        ("sampler", {_spec(c["sampler"]) for c in configs}),
        ("evaluated images", {_spec(c["eval_transform"]) for c in configs}),
        (
            "dimension",
            {str(c["method"].get("dim")) for c in configs if isinstance(c["method"], dict)},
        ),
        ("k-means", {_clustering(c["evaluate"]) for c in configs}),
    ]
    yield "; ".join(f"{name}: {_some(values)}" for name, values in parts if values) + "."
    data = {f"{r['digests']['data'][:12]} ({_counts(r['data'])})" for r in results}
    weights = {f"{r['pretraining'] or 'none'}" + _digest_of(r) for r in results}
    yield f"Data: {_some(data)}. Pretraining: {_some(weights)}."
    code = {_code(r["code"]) for r in results}
    devices = {f"{r['devices']['count']} x {r['devices']['kind']}" for r in results}
    versions = {f"jax {r['versions'].get('jax')}" for r in results}
    hours = sum(r["wall_seconds"] for r in results) / 3600
    yield (
        f"Code: {_some(code)}, {_some(versions)}; devices: {_some(devices)}; "
        f"{hours:.1f} hours of runs."
    )


def _spec(spec: Any) -> str:
    if not isinstance(spec, Mapping):
        return str(spec)
    options = ", ".join(f"{k}={v}" for k, v in spec.items() if k != "name" and v is not None)
    return f"{spec['name']}({options})" if options else spec["name"]


def _clustering(options: Mapping[str, Any]) -> str:
    starts = options.get("starts", 1)
    best = f", each the best of {starts} starts by inertia" if starts > 1 else ""
    return f"seeds {', '.join(map(str, options.get('seeds', ())))}{best}"


def _some(values: set[str], most: int = 3) -> str:
    ordered = sorted(values)
    more = f" and {len(ordered) - most} others" if len(ordered) > most else ""
    return " | ".join(ordered[:most]) + more


def _counts(data: Mapping[str, Mapping[str, int]]) -> str:
    return ", ".join(
        f"{name} {counts.get('images', 0):,} images of {counts.get('classes', 0):,} classes"
        for name, counts in data.items()
    )


def _digest_of(result: Mapping[str, Any]) -> str:
    weights = result["digests"].get("weights")
    return f" ({weights[:12]})" if weights else ""


def _code(code: Mapping[str, Any] | None) -> str:
    if code is None:
        return "an installed package"
    return code["revision"][:12] + (" with changes (dirty)" if code["dirty"] else "")


def _raw(study: Study, by_row: Mapping[str, Sequence[_Run]]) -> Iterable[dict[str, Any]]:
    """One line for every run: what it was, what became of it, and all of its scores."""
    rows = {row.name for row in study.rows}
    for name, runs in by_row.items():
        for run in sorted(runs, key=lambda r: (r.planned.seed, r.planned.fold or 0)):
            planned, outcome = run.planned, run.outcome
            line: dict[str, Any] = {
                "row": name,
                "seed": planned.seed,
                "fold": planned.fold,
                "digest": planned.digest,
                "state": outcome.state,
                "message": outcome.message,
            }
            if outcome.result is not None:
                chosen, scores = outcome.result["chosen"], outcome.result["scores"]
                if name not in rows:  # a trial: the best of many, so its test scores say nothing
                    scores = {k: v for k, v in scores.items() if not k.startswith("test/")}
                line |= {
                    "step": chosen["step"],
                    "rule": "last"
                    if chosen["score"] is None
                    else f"{chosen['split']}/{chosen['score']}",
                    "test_chosen": chosen["uses_test"],
                    "candidates": chosen["candidates"],
                    "wall_seconds": round(outcome.result["wall_seconds"], 1),
                    **scores,
                }
            yield line
