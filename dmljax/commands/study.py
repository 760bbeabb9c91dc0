"""Make all runs of a study, and print them as one table with intervals and tests.

    dmljax study run studies/glyphs.py --workers=2      python -m dmljax.main --study=...
    dmljax study run studies/graph_ablations.py --config.dataset.root=cub200 --dry-run
    dmljax study table studies/glyphs.py --format=html --out=glyphs.html
    dmljax study sizes studies/abe_tables.py            parameters and operations of every row
    dmljax study array studies/glyphs.py --tasks=8      prints the line for Slurm
    dmljax study compare runs/by_digest/0a... runs/by_digest/7f...

The same command continues a study, on any number of hosts with one file system. `table` may be
called at any time. docs/studies.md says how a study file is written and how a table is read.

Exit status: 0 all runs are finished, 1 a run failed, 2 the input is wrong, 130 or 143 stopped.
"""

from __future__ import annotations

import argparse
import pathlib
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dmljax.commands.parser import add_trust, refuse
from dmljax.files import reading
from dmljax.hints import check_known, hint

if TYPE_CHECKING:
    from dmljax.studies.folder import Session

ACTIONS = ("run", "table", "sizes", "array", "compare", "work", "join")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", help="run, table, sizes, array or compare")
    parser.add_argument("names", nargs="*", help="the study file; two run folders for compare")
    parser.add_argument("--study", help="the study file, as a flag")
    parser.add_argument("--workdir", help="folder of the study; runs/studies/NAME by default")
    parser.add_argument("--runs", help="folder of the runs of all studies; runs/by_digest")
    parser.add_argument("--workers", type=int, help="processes on this host (default 1)")
    parser.add_argument("--only", action="append", default=[], help="a row; may be repeated")
    parser.add_argument("--dry-run", action="store_true", help="print the runs, make none")
    parser.add_argument("--retry", action="store_true", help="make failed runs again")
    parser.add_argument("--no-wait", action="store_true", help="do not wait for other workers")
    add_trust(parser)
    parser.add_argument("--storage", help="database of a search, such as postgresql+psycopg://...")
    parser.add_argument("--format", help="format of the table: md (default), tex, csv, html")
    parser.add_argument("--spread", help="what every cell shows: interval or deviation")
    parser.add_argument("--out", help="file for the table or the sizes, instead of the terminal")
    parser.add_argument("--tasks", type=int, help="number of tasks of a Slurm array")
    parser.add_argument("--score", help="the only score that compare prints, such as MAP@R")


def run(arguments: argparse.Namespace, extras: Sequence[str]) -> int:
    words = [word for word in extras if word.startswith("--config.")]
    refuse("study", [word for word in extras if word not in words])
    action = arguments.action
    if action is None and arguments.study is not None:
        action = "run"
    if action is None:
        raise ValueError("study needs a verb and a file: dmljax study run studies/glyphs.py")
    if arguments.workdir == "":
        raise ValueError("--workdir= is empty: name the folder of the study, or leave the flag out")
    if action not in ACTIONS:
        raise ValueError(f"study: there is no {action!r}{hint(str(action), ACTIONS[:5])}")
    if action == "compare":
        return _compare(arguments, words)
    if action == "join":
        from dmljax.studies import joined

        out, *folders = arguments.names
        joined.write(out, [pathlib.Path(folder) for folder in folders], words)
        return 0
    names = [*arguments.names, *filter(None, [arguments.study])]
    if len(names) != 1:
        raise ValueError("study needs one study file, such as: dmljax study run studies/glyphs.py")
    for flag in ("workers", "tasks"):
        if (count := getattr(arguments, flag)) is not None and count < 1:
            raise ValueError(f"--{flag} must be 1 or more, not {count}")
    from dmljax.studies import session as sessions

    session = sessions.open_session(
        names[0],
        workdir=arguments.workdir,
        runs=arguments.runs,
        words=words,
        storage=arguments.storage,
    )
    if action == "work":  # one of several workers, which `run` has started
        return sessions.work(session, only=arguments.only, wait=not arguments.no_wait)
    actions = {"run": _run, "table": _table, "sizes": _sizes, "array": _array}
    return actions[action](session, arguments)


def _run(session: Session, arguments: argparse.Namespace) -> int:
    from dmljax.studies import launch
    from dmljax.studies import session as sessions

    variables = launch.environments(arguments.workers or 1)
    runs = sessions.prepare(session, only=arguments.only, write=not arguments.dry_run)
    if arguments.dry_run:
        print(sessions.describe(session, runs))
        return 0
    sessions.check_only(session, arguments.only)
    if arguments.retry and (count := sessions.forget_failures(session)):
        print(f"{count} failed run{'s'[: count - 1]} will be made again")
    if len(variables) > 1:
        status = launch.start(["study", "work", *_words(session, arguments)], variables)
    else:
        status = sessions.work(
            session,
            only=arguments.only,
            wait=not arguments.no_wait,
            environment=variables[0],
        )
    if status in (130, 143):
        print("stopped; the same command continues", file=sys.stderr)
        return status
    if status not in (0, 1):
        return status
    table = sessions.write_tables(session)
    print()
    print(sessions.text_of(table, "md"), end="")
    print(f"\ntable: {session.folder.path}/table.html, .md, .tex and .csv")
    return status


def _words(session: Session, arguments: argparse.Namespace) -> list[str]:
    """The words that give another worker this session."""
    options = {"workdir": arguments.workdir, "runs": arguments.runs, "storage": arguments.storage}
    flags = [f"--{key}={value}" for key, value in options.items() if value is not None]
    flags += [f"--only={row}" for row in arguments.only]
    flags += ["--no-wait"] * arguments.no_wait
    return [session.study.source, *flags, *reading.trust_words(), *session.words]


def _table(session: Session, arguments: argparse.Namespace) -> int:
    from dmljax.files.writing import write_text
    from dmljax.studies import printing
    from dmljax.studies import session as sessions

    format_ = arguments.format or (
        pathlib.Path(arguments.out).suffix.removeprefix(".") if arguments.out else "md"
    )
    check_known("--format: there is no", [format_], printing.FORMATS)
    spread = arguments.spread or printing.SPREAD
    check_known("--spread: there is no", [spread], printing.SPREADS)
    sessions.check_unchanged(session)
    text = sessions.text_of(sessions.make_table(session), format_, spread=spread)
    if arguments.out:
        write_text(arguments.out, text)
    else:
        print(text, end="")
    return 0


def _sizes(session: Session, arguments: argparse.Namespace) -> int:
    """Prints the sizes of the nets of all rows, or writes them as JSON."""
    from dmljax.files.writing import write_json
    from dmljax.studies import sizes

    content = sizes.of_study(session.study)
    if arguments.out:
        write_json(arguments.out, {"digest": session.study.digest, "sizes": content}, indent=1)
    else:
        width = max(map(len, content))
        for row, size in content.items():
            print(f"{row:{width}}  " + ", ".join(f"{size[key]:,} {key}" for key in size))
    return 0


def _array(session: Session, arguments: argparse.Namespace) -> int:
    """Prints the line that starts the study as an array of Slurm tasks."""
    study, words = session.study, _words(session, arguments)
    runs = sum(len(study.seeds_of(row)) for row in study.rows)
    if study.search is not None:
        runs += study.search.trials * len(study.search.seeds)
    runs *= study.folds or 1
    words += ["--no-wait"] * ("--no-wait" not in words)
    task = shlex.join([sys.executable, "-m", "dmljax.main", "study", "run", *words])
    options = [
        f"--array=1-{arguments.tasks or min(8, runs)}",
        "--job-name=study",
        "--requeue",
        "--open-mode=append",
        "--output=study-%A_%a.out",
        "--signal=B:TERM@120",
    ]
    print(shlex.join(["sbatch", *options, f"--wrap=exec {task}"]))
    return 0


def _compare(arguments: argparse.Namespace, words: Sequence[str]) -> int:
    """The same as `dmljax report A B --text`."""
    from dmljax.commands import report

    refuse("study compare", words)
    if len(arguments.names) < 2:
        raise ValueError("compare needs two run folders, such as: dmljax study compare A B")
    report.print_comparison(arguments.names, score=arguments.score)
    return 0
