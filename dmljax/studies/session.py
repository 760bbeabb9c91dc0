"""The verbs of `dmljax study`: plan a study, make its runs, show its table."""

from __future__ import annotations

import json
import pathlib
import shlex
import sys
from collections.abc import Sequence

from dmljax.files import reading
from dmljax.files.writing import write_text
from dmljax.hints import hint
from dmljax.studies import (
    joined,
    launch,
    outcomes,
    page,
    plan,
    printing,
    search,
    sizes,
    study_file,
    table,
)
from dmljax.studies.folder import Session, StudyFolder, default_folder
from dmljax.studies.plan import PlannedRun
from dmljax.studies.study_file import Study
from dmljax.studies.table import Table
from dmljax.studies.worker import Worker, command

__all__ = [
    "array_line",
    "check_only",
    "describe",
    "forget_failures",
    "make_table",
    "open_session",
    "prepare",
    "selected",
    "text_of",
    "work",
    "write_tables",
]


def open_session(
    name: str,
    *,
    workdir: str | None = None,
    runs: str | None = None,
    words: Sequence[str] = (),
    storage: str | None = None,
) -> Session:
    """Reads a study file; nothing is written."""
    study = study_file.read(name)
    plan.check_flags(words)
    folder = StudyFolder(
        default_folder(study) if workdir is None else pathlib.Path(workdir),
        None if runs is None else pathlib.Path(runs),
    )
    return Session(study, folder, tuple(words), storage)


def prepare(session: Session, *, only: Sequence[str] = (), write: bool = True) -> list[PlannedRun]:
    """Checks every row and plans all runs that are known now; `write` records them in the index.

    Returns the runs of the rows `only`, or all runs. A wrong name of a row writes nothing.
    """
    study, folder = session.study, session.folder
    configs = plan.check_rows(study)
    planner = plan.Planner(study, folder.runs, session.words)
    runs = planner.runs_of(plan.plain_rows(study))
    if study.search is not None and study.search.enumerated:
        points = plan.enumerated_points(study.search)
        runs += planner.runs_of(plan.rows_of_search(study.search, points))
    chosen = selected(runs, only, study)
    if write:
        for path in (folder.path, folder.runs):
            outcomes.check_locks(path)
        folder.record(study, configs, runs)
        if study.search is not None and not study.search.enumerated:
            from dmljax.studies import engine

            engine.create(study, folder, session.storage)
        if study.columns:
            sizes.ensure(session)
    return chosen


def selected(runs: Sequence[PlannedRun], only: Sequence[str], study: Study) -> list[PlannedRun]:
    """The runs of the rows `only`, and those that they start from."""
    extra = [row.name for row in study.rows]
    names = dict.fromkeys([*(run.row for run in runs), *extra])
    for name in only:
        if name not in names:
            raise ValueError(f"--only: there is no row {name!r}{hint(name, names)}")
    if not only:
        return list(runs)
    needed = _needed(only, study)
    return [run for run in runs if run.row in needed]


def _needed(only: Sequence[str], study: Study) -> set[str]:
    """The rows `only`, with the rows that they start from or whose runs they read."""
    needed = set(only)
    for _ in study.rows:
        needed |= {r.start_from for r in study.rows if r.name in needed and r.start_from}
        needed |= {r.runs_of for r in study.rows if r.name in needed and r.runs_of}
    return needed


def check_only(session: Session, only: Sequence[str]) -> None:
    """Refuses a row that is from the search while trials are missing."""
    study = session.study
    needed = _needed(only, study)
    names = [row.name for row in study.rows if row.from_search and row.name in needed]
    if names and not search.is_over(session):
        assert study.search is not None
        raise ValueError(
            f"--only: the row {names[0]!r} is the best of {study.search.trials} trials, and not "
            "all of them are over: run the study without --only, which makes them first"
        )


def work(
    session: Session,
    *,
    only: Sequence[str] = (),
    wait: bool = True,
    environment: dict[str, str] | None = None,
) -> int:
    """One worker: makes runs until all are over; the number of failed runs."""
    study, folder = session.study, session.folder
    worker = Worker(
        folder,
        study,
        words=session.words,
        environment=environment,
        wait=wait,
        say=_say,
    )
    with launch.handling_signals(worker.handle):
        failed = worker.make_all(selected(folder.planned(), only, study))
        failed += _make_started(session, worker, only)
        best = [row for row in study.rows if row.from_search]
        if only:
            best = [row for row in best if row.name in _needed(only, study)]
        if study.search is None or (only and not best):
            return failed + joined.make_all(session, worker)
        if not study.search.enumerated and not only:
            from dmljax.studies import engine

            engine.work(session, worker, wait=wait)
        if not best or not (wait or search.is_over(session)):
            return failed + joined.make_all(session, worker)
        overrides = search.best_overrides(session)
        rows = [row._replace(overrides={**row.overrides, **overrides}) for row in best]
        planner = plan.Planner(study, folder.runs, session.words)
        runs = planner.runs_of(rows)
        folder.extend(runs)
        return failed + worker.make_all(runs) + joined.make_all(session, worker)


def _make_started(session: Session, worker: Worker, only: Sequence[str]) -> int:
    """Makes the runs that start from finished ones; others may start from these in turn."""
    study, folder, failed = session.study, session.folder, 0
    if not any(row.start_from for row in study.rows):
        return 0
    planner = plan.Planner(study, folder.runs, session.words)
    rows = [row for row in study.rows if row.start_from and (not only or row.name in only)]
    digests: set[str] = set()
    while True:
        runs = [run for run in planner.runs_of(rows) if run.digest not in digests]
        if not runs:
            return failed
        folder.extend(runs)
        failed += worker.make_all(runs)
        digests |= {run.digest for run in runs}


def _say(text: str) -> None:
    print(text, flush=True)


def describe(session: Session, runs: Sequence[PlannedRun]) -> str:
    """All runs with their folders, states and commands, without making any."""
    lines = []
    for run in runs:
        folder = session.folder.run_folder(run.digest)
        state = outcomes.outcome(folder).state
        words = command(run, folder, session.words)
        lines.append(f"{run.digest}  {state:9s} {run.title}\n    {shlex.join(words)}")
    study = session.study
    count = len({run.digest for run in runs})
    lines.append(
        f"{study.title}: {len(study.rows)} rows, {count} runs; table in {session.folder.path}"
    )
    return "\n".join(lines)


def make_table(session: Session) -> Table:
    """The table of the runs that are finished now."""
    folder = session.folder
    runs, lines = [], {}
    for run in folder.planned():
        path = folder.run_folder(run.digest)
        if session.study.curves and (path / "metrics.jsonl").exists():
            lines[run.digest] = [
                json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()
            ]
        config = reading.config_of_run(path) if (path / "config.json").exists() else None
        runs.append((run, outcomes.outcome(path), config))
    return table.make(
        session.study, runs, joined=joined.read(session), sizes=sizes.read(session), lines=lines
    )


def text_of(study_table: Table, format_: str, *, spread: str = "interval") -> str:
    """A table in one of the formats."""
    if format_ == "csv":
        return printing.as_csv(study_table)
    functions = {"md": printing.as_markdown, "tex": printing.as_latex, "html": page.as_html}
    return functions[format_](study_table, spread=spread)


def write_tables(session: Session) -> Table:
    """Writes the table into the folder of the study in all formats."""
    study_table = make_table(session)
    for format_ in printing.FORMATS:
        write_text(session.folder.path / f"table.{format_}", text_of(study_table, format_))
    return study_table


def forget_failures(session: Session) -> int:
    """Removes the marks of failed runs; how many there were."""
    count = 0
    for run in session.folder.planned():
        path = session.folder.run_folder(run.digest)
        if outcomes.outcome(path).state in ("failed", "diverged"):
            outcomes.forget_failure(path)
            count += 1
    return count


def array_line(tasks: int, words: Sequence[str]) -> str:
    """The line that starts `dmljax study run WORDS` as an array of Slurm tasks."""
    inner = [sys.executable, "-m", "dmljax.main", "study", "run", *words]
    inner += ["--no-wait"] * ("--no-wait" not in inner)
    options = [
        f"--array=1-{tasks}",
        "--job-name=study",
        "--requeue",
        "--open-mode=append",
        "--output=study-%A_%a.out",
        "--signal=B:TERM@120",
    ]
    return shlex.join(["sbatch", *options, f"--wrap=exec {shlex.join(inner)}"])
