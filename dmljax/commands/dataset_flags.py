"""The flags that name a data set, for every verb that reads one."""

import argparse
from typing import Any

from dmljax.config import registry
from dmljax.data.splits import Splits

_FLAGS = {
    "root": "folder of the original files",
    "path": "file of a table or npz",
    "source": "files (default) or tfds",
    "data_dir": "folder in which TFDS keeps its data sets",
    "split": "fraction of the classes for training, or their names separated by commas",
    "corpus": "In-Shop: img or img_highres",
}


def add_dataset_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that name a data set and its arguments."""
    parser.add_argument("--dataset", help=f"one of: {', '.join(registry.names('dataset'))}")
    for name, help_ in _FLAGS.items():
        parser.add_argument(f"--{name}", help=help_)


def dataset_of_flags(arguments: argparse.Namespace) -> dict[str, Any]:
    """The data set of parsed flags, as a config names it: `dict(name=..., root=...)`."""
    if not arguments.dataset:
        raise ValueError(f"--dataset is needed, one of: {', '.join(registry.names('dataset'))}")
    values = {name: getattr(arguments, name) for name in _FLAGS}
    spec = {name: value for name, value in values.items() if value is not None}
    if "split" in spec:
        try:
            spec["split"] = float(spec["split"])
        except ValueError:
            spec["split"] = spec["split"].split(",")
    return {"name": arguments.dataset, **spec}


def load(spec: dict[str, Any]) -> Splits:
    """The data set of a spec. The error about a missing argument names it."""
    try:
        return registry.resolve("dataset", spec)()
    except TypeError as error:
        message = str(error).replace("missing 1 required keyword-only argument", "also needs")
        raise ValueError(message) from error
