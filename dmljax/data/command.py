"""What `prepare` and `doctor` share: the data set of a command line, and errors of one line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from absl import logging
from rich import console as rich_console
from rich import progress as rich_progress

from dmljax.data import datasets
from dmljax.data.splits import Splits
from dmljax.train import config as config_lib
from dmljax.train import registry

__all__ = ["Parser", "add_dataset", "load", "progress", "run", "spec_of", "spec_of_config"]


class Parser(argparse.ArgumentParser):
    """Flags, with the module's docstring as the help; what is wrong with them is one line."""

    def __init__(self, module: str, description: str):
        super().__init__(
            prog=f"python -m {module}",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str):
        raise ValueError(f"{message} (see {self.prog} --help)")


def add_dataset(parser: argparse.ArgumentParser) -> None:
    """The flags that name a data set; each is handed on only where it is given."""
    parser.add_argument("--dataset", help=f"one of: {', '.join(datasets.__all__)}")
    parser.add_argument("--root", help="folder of the original files")
    parser.add_argument("--path", help="file of a table or npz")
    parser.add_argument("--source", help="files (default) or tfds")
    parser.add_argument("--data_dir", help="where TFDS keeps its sets")
    parser.add_argument("--split", help="fraction of classes for training, or names, by commas")
    parser.add_argument("--corpus", help="In-Shop: img or img_highres")


def spec_of(args: argparse.Namespace) -> dict[str, Any]:
    """The flags as a config spells them: `dict(name=..., root=...)`."""
    if not args.dataset:
        raise ValueError(f"--dataset is needed, one of: {', '.join(datasets.__all__)}")
    names = ("root", "path", "source", "data_dir", "split", "corpus")
    given = {n: getattr(args, n) for n in names if getattr(args, n) is not None}
    if "split" in given:
        try:
            given["split"] = float(given["split"])
        except ValueError:
            given["split"] = given["split"].split(",")
    return {"name": args.dataset, **given}


def spec_of_config(file: str, overrides: Sequence[str]) -> dict[str, Any]:
    """`config.dataset` of a config file, after overrides such as `--config.dataset.root=...`."""
    config = config_lib.read(file, overrides)
    if not config.get("dataset"):
        raise ValueError(f"get_config() of {file} sets no dataset")
    found = config["dataset"]
    return {"name": found} if isinstance(found, str) else found


def load(spec: dict[str, Any]) -> Splits:
    """The data set of a spec; an argument that is needed and not given is named."""
    try:
        return registry.resolve("dataset", spec)()
    except TypeError as error:
        message = str(error).replace("missing 1 required keyword-only argument", "also needs")
        raise ValueError(message) from error


class progress:
    """Counts to `total` on stderr: a bar on a terminal, otherwise a line at each tenth."""

    def __init__(self, title: str, total: int):
        self._title, self._total, self._done = title, total, 0
        console = rich_console.Console(stderr=True)
        columns = rich_progress.Progress.get_default_columns()
        count = rich_progress.MofNCompleteColumn()
        self._bar = rich_progress.Progress(*columns, count, console=console)
        self._task = self._bar.add_task(title, total=total)
        self._plain = not console.is_terminal

    def __enter__(self) -> progress:
        if not self._plain:
            self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        if not self._plain:
            self._bar.stop()

    def advance(self) -> None:
        self._done += 1
        if not self._plain:
            self._bar.advance(self._task)
        elif self._done * 10 // self._total > (self._done - 1) * 10 // self._total:
            print(f"{self._title}: {self._done} of {self._total}", file=sys.stderr, flush=True)


def run(main: Callable[[Sequence[str]], int]) -> None:
    """Runs a command; whatever is the user's to mend is one line, not a traceback."""
    logging.set_verbosity(logging.WARNING)
    # Names of files need not be valid text, and a report must not end for that.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")
    try:
        status = main(sys.argv[1:])
    except (ValueError, OSError, ImportError) as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        status = 130
    sys.exit(status)
