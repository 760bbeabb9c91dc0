"""Run the missing runs of a study, and print a table with intervals and tests.

    dmljax study run studies/glyphs.py
    dmljax study run studies/graph_ablations.py --config.dataset.root=cub200 --dry-run
    dmljax study table studies/glyphs.py --out=glyphs.html

The same command continues a study. Any number of processes may run it at the same time, on hosts
that share a file system: each takes the next missing run (launch/study.sh). `table` works at any
time. docs/studies.md explains study files and tables.

Exit status: 0 all runs are finished, 1 a run failed, 2 the input is wrong, 130 or 143 interrupted.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dmljax.commands.parser import add_fields, add_trust, flag, refuse
from dmljax.hints import check_known, counted

if TYPE_CHECKING:
    from dmljax.studies.executor import Executor

_ACTIONS = ("run", "table")  # and "join", by which `run` scores an ensemble


@dataclasses.dataclass(frozen=True)
class Flags:
    """Flags of a study."""

    workdir: str | None = flag(None, "folder of the study; runs/studies/NAME by default")
    runs: str | None = flag(None, "folder of the runs of all studies; runs/by_digest by default")
    only: tuple[str, ...] = flag((), "run only this row; may be repeated")
    dry_run: bool = flag(False, "print the runs without running")
    retry: bool = flag(False, "run failed runs again")
    no_wait: bool = flag(False, "exit without waiting for runs of other processes")
    out: str | None = flag(None, "with table: file to write, .md, .tex, .csv or .html")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", help="run or table")
    parser.add_argument("names", nargs="*", help="study file")
    add_fields(parser, Flags)
    add_trust(parser)


def run(arguments: argparse.Namespace, extras: Sequence[str]) -> int:
    words = [word for word in extras if word.startswith("--config.")]
    refuse("study", [word for word in extras if word not in words])
    names, action = arguments.names, arguments.action
    if action == "join":
        from dmljax.studies import ensembles

        ensembles.write(pathlib.Path(arguments.workdir), [pathlib.Path(x) for x in names], words)
        return 0
    if action is None or len(names) != 1:
        raise ValueError("study needs a verb and a file: dmljax study run studies/glyphs.py")
    check_known("study has no verb", [action], _ACTIONS)
    from dmljax.studies import study_file
    from dmljax.studies.executor import Executor
    from dmljax.studies.folder import StudyFolder, default_folder

    study = study_file.read(names[0])
    path = pathlib.Path(arguments.workdir) if arguments.workdir else default_folder(study)
    runs = None if arguments.runs is None else pathlib.Path(arguments.runs)
    executor = Executor(study, StudyFolder(path, runs), words)
    return _run(executor, arguments) if action == "run" else _table(executor, arguments)


def _run(executor: Executor, arguments: argparse.Namespace) -> int:
    from dmljax.studies import printing
    from dmljax.studies.executor import Stopped

    if arguments.dry_run:
        runs = executor.plan(arguments.only)
        for run in runs:
            command = run.command(executor.folder.runs, executor.words)
            state = executor.outcome(run).state
            print(f"{run.digest}  {state:9s} {run.title}\n    {shlex.join(command)}")
        rows, distinct = len(executor.study.rows), len({run.digest for run in runs})
        count = f"{counted(rows, 'row')}, {counted(distinct, 'run')}"
        print(f"{executor.study.title}: {count}; table in {executor.folder.path}")
        return 0
    try:
        failed = executor.run(arguments.only, wait=not arguments.no_wait, retry=arguments.retry)
    except Stopped as stopped:
        print("stopped; the same command continues", file=sys.stderr)
        return stopped.status
    table = executor.table()
    for format_ in printing.FORMATS:
        _write(table, executor.folder.path / f"table.{format_}")
    print(f"\n{printing.as_markdown(table)}")
    print(f"table: {executor.folder.path}/table.html, .md, .tex and .csv")
    return 1 if failed else 0


def _table(executor: Executor, arguments: argparse.Namespace) -> int:
    from dmljax.studies import printing

    if arguments.out:
        suffix = pathlib.Path(arguments.out).suffix.removeprefix(".")
        check_known("--out has no format", [suffix], printing.FORMATS)
    table = executor.table()
    if arguments.out:
        _write(table, pathlib.Path(arguments.out))
    else:
        print(printing.as_markdown(table), end="")
    return 0


def _write(table, path: pathlib.Path) -> None:
    from dmljax.files.writing import write_text
    from dmljax.studies import printing

    write_text(path, printing.FORMATS[path.suffix.removeprefix(".")](table))
