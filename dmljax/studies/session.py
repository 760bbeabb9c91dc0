"""The verbs of `dmljax study`: plan a study, make its runs, show its table."""

import pathlib
import shlex
from collections.abc import Sequence

from dmljax.files import reading
from dmljax.files.writing import write_text
from dmljax.hints import check_known, counted
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
from dmljax.studies.worker import Stopped, Worker, command


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
    runs = session.planner.runs_of(plan.plain_rows(study))
    if study.search is not None and study.search.enumerated:
        runs += session.planner.runs_of(plan.rows_of_search(study.search))
    chosen = selected(runs, only, study)
    if write:
        for path in (folder.path, folder.runs):
            outcomes.check_locks(path)
        folder.record(study, configs, runs)
        if study.search is not None and not study.search.enumerated:
            from dmljax.studies import engine

            engine.create(session)
        if study.columns:
            sizes.ensure(session)
    return chosen


def selected(runs: Sequence[PlannedRun], only: Sequence[str], study: Study) -> list[PlannedRun]:
    """The runs of the rows `only`, and those that they start from."""
    names = {run.row for run in runs} | {row.name for row in study.rows}
    check_known("--only: there is no row", only, names)
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
        raise ValueError(
            f"--only: the row {names[0]!r} is the best of {session.search.trials} trials, and not "
            "all of them are over: run the study without --only, which makes them first"
        )


def work(
    session: Session,
    *,
    only: Sequence[str] = (),
    wait: bool = True,
    environment: dict[str, str] | None = None,
) -> int:
    """One worker: makes runs until all are over; the exit status."""
    worker = Worker(session, environment=environment, wait=wait)
    try:
        with launch.handling_signals(worker.handle):
            failed = worker.make_all(selected(session.folder.planned(), only, session.study))
            failed += _make_started(session, worker, only)
            failed += _make_best(session, worker, only, wait=wait)
            failed += joined.make_all(session, worker)
    except Stopped as stopped:
        return stopped.status
    return 1 if failed else 0


def _make_best(session: Session, worker: Worker, only: Sequence[str], *, wait: bool) -> int:
    """Searches, and makes the runs of the rows that take the best trial; how many failed."""
    study = session.study
    best = [row for row in study.rows if row.from_search]
    if only:
        best = [row for row in best if row.name in _needed(only, study)]
    if study.search is not None and not study.search.enumerated and not only:
        from dmljax.studies import engine

        engine.work(session, worker, wait=wait)
    if not best or not (wait or search.is_over(session)):
        return 0
    overrides = search.best_overrides(session)
    rows = [row._replace(overrides={**row.overrides, **overrides}) for row in best]
    return worker.make_all(session.extend(rows))


def _make_started(session: Session, worker: Worker, only: Sequence[str]) -> int:
    """Makes the runs that start from finished ones; others may start from these in turn."""
    failed, digests = 0, set[str]()
    rows = [row for row in session.study.rows if row.start_from and (not only or row.name in only)]
    while runs := [run for run in session.planner.runs_of(rows) if run.digest not in digests]:
        session.folder.extend(runs)
        failed += worker.make_all(runs)
        digests |= {run.digest for run in runs}
    return failed


def describe(session: Session, runs: Sequence[PlannedRun]) -> str:
    """All runs with their folders, states and commands, without making any."""
    lines = []
    for run in runs:
        words = command(run, session.folder.run_folder(run.digest), session.words)
        state = session.outcome(run).state
        lines.append(f"{run.digest}  {state:9s} {run.title}\n    {shlex.join(words)}")
    study = session.study
    count = len({run.digest for run in runs})
    more = ""
    if study.search is not None and not study.search.enumerated:  # its points are not known yet
        more = f", and {counted(study.search.trials, 'trial')} of the search"
    runs_of_rows = f"{counted(len(study.rows), 'row')}, {counted(count, 'run')}"
    lines.append(f"{study.title}: {runs_of_rows}{more}; table in {session.folder.path}")
    return "\n".join(lines)


def check_unchanged(session: Session) -> None:
    """Refuses a study file that contradicts the runs in its folder, as `prepare` does."""
    session.folder.check(session.study, plan.check_rows(session.study))


def make_table(session: Session) -> Table:
    """The table of the runs that are finished now."""
    folder = session.folder
    runs, lines = [], {}
    for run in folder.planned():
        path = folder.run_folder(run.digest)
        if session.study.curves:
            lines[run.digest] = reading.json_lines(path / "metrics.jsonl")
        config = reading.config_of_run(path) if (path / "config.json").exists() else None
        runs.append((run, session.outcome(run), config))
    return table.make(
        session.study, runs, joined=joined.read(session), sizes=sizes.read(session), lines=lines
    )


def text_of(study_table: Table, format_: str, *, spread: str = printing.SPREAD) -> str:
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
        if session.outcome(run).has_failed:
            outcomes.forget_failure(session.folder.run_folder(run.digest))
            count += 1
    return count
