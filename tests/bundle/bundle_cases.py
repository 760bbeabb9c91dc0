"""A trained run and its bundle, made once for all tests of a process."""

import pathlib

from system import tiny

from dmljax.bundle import exporting
from dmljax.runs import training


def trained(folder: pathlib.Path, **fields) -> pathlib.Path:
    """The folder of a run of two steps."""
    evaluate = {"every": 2, "ks": [1], "batch_size": 16, "clustering": None}
    config = tiny(folder, steps=2, evaluate=evaluate) | fields
    training.run(config, folder / "run")
    return folder / "run"


def exported(run: pathlib.Path, out: pathlib.Path, **options) -> pathlib.Path:
    return exporting.export(run, out, batch_sizes=(1, 4, 16), **options)
