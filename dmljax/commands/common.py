"""What the commands share: flags that name a data set, and errors in one line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

from absl import logging

from dmljax.data import datasets
from dmljax.data.splits import Splits
from dmljax.train import config as config_lib
from dmljax.train import registry

__all__ = [
    "Parser",
    "add_dataset_flags",
    "dataset_of_config",
    "dataset_of_flags",
    "load",
    "run",
]

_DATASET_FLAGS = {
    "root": "folder of the original files",
    "path": "file of a table or npz",
    "source": "files (default) or tfds",
    "data_dir": "folder in which TFDS keeps its data sets",
    "split": "fraction of the classes for training, or their names separated by commas",
    "corpus": "In-Shop: img or img_highres",
}


class Parser(argparse.ArgumentParser):
    """Parses flags. The docstring of the command is its help; a wrong flag is a ValueError."""

    def __init__(self, module: str, description: str | None):
        super().__init__(
            prog=f"python -m {module}",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str):
        raise ValueError(f"{message} (see {self.prog} --help)")


def add_dataset_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that name a data set and its arguments."""
    parser.add_argument("--dataset", help=f"one of: {', '.join(datasets.__all__)}")
    for name, help_ in _DATASET_FLAGS.items():
        parser.add_argument(f"--{name}", help=help_)


def dataset_of_flags(args: argparse.Namespace) -> dict[str, Any]:
    """The data set of parsed flags as a config spells it: `dict(name=..., root=...)`."""
    if not args.dataset:
        raise ValueError(f"--dataset is needed, one of: {', '.join(datasets.__all__)}")
    values = {name: getattr(args, name) for name in _DATASET_FLAGS}
    spec = {name: value for name, value in values.items() if value is not None}
    if "split" in spec:
        try:
            spec["split"] = float(spec["split"])
        except ValueError:
            spec["split"] = spec["split"].split(",")
    return {"name": args.dataset, **spec}


def dataset_of_config(file: str, overrides: Sequence[str]) -> dict[str, Any]:
    """`config.dataset` of a config file, after overrides such as `--config.dataset.root=...`."""
    config = config_lib.read(file, overrides)
    if not config.get("dataset"):
        raise ValueError(f"get_config() of {file} sets no dataset")
    spec = config["dataset"]
    return {"name": spec} if isinstance(spec, str) else spec


def load(spec: dict[str, Any]) -> Splits:
    """The data set of a spec. The error about a missing argument names it."""
    try:
        return registry.resolve(datasets, spec)()
    except TypeError as error:
        message = str(error).replace("missing 1 required keyword-only argument", "also needs")
        raise ValueError(message) from error


def run(main: Callable[[Sequence[str]], int]) -> None:
    """Runs a command. Prints one line, not a traceback, for errors that the user can correct."""
    logging.set_verbosity(logging.WARNING)
    # File names may be invalid text, which must not end a report.
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
