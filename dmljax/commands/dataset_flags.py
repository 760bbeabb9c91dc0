"""The data set that a command line names: `--dataset=NAME --ARGUMENT=VALUE ...`."""

import argparse
from collections.abc import Sequence
from typing import Any

from dmljax.commands.parser import refuse
from dmljax.config import registry
from dmljax.config.fields import PATHS
from dmljax.data.splits import Splits
from dmljax.hints import check_known, counted


def add_dataset(parser: argparse.ArgumentParser) -> None:
    """Adds the flag that names a data set; `dataset_of` reads the arguments of the data set."""
    names = ", ".join(registry.names("dataset"))
    parser.add_argument("--dataset", help=f"one of: {names}; --root=... and so on are arguments")


def dataset_of(verb: str, name: str | None, extras: Sequence[str]) -> dict[str, Any]:
    """Returns the data set of a command line as a config has it: `dict(name=..., root=...)`.

    `extras` are the words `--ARGUMENT=VALUE` of the data set.
    """
    if not name:
        raise ValueError(f"--dataset is needed, one of: {', '.join(registry.names('dataset'))}")
    spec: dict[str, Any] = {"name": name}
    for word in extras:
        argument, equals, value = word.removeprefix("--").partition("=")
        if not (word.startswith("--") and equals):
            refuse(verb, [word])
        spec[argument] = value
    if "split" in spec:
        is_number = spec["split"].replace(".", "", 1).isdigit()
        spec["split"] = float(spec["split"]) if is_number else spec["split"].split(",")
    return spec


def load(spec: dict[str, Any]) -> Splits:
    """Loads the data set of a spec. The error about a missing argument names it."""
    try:
        return registry.resolve("dataset", spec)()
    except TypeError as error:
        message = str(error).replace("missing 1 required keyword-only argument", "also needs")
        raise ValueError(message) from error


def write_split(bundle: Any, name: str, root: str | None, folder: str) -> None:
    """Writes the images of a split of the data set in the bundle's config to a folder."""
    from dmljax.data import image_files

    check_known("--split: there is no", [name], ("train", "test"))
    spec = dict(bundle.manifest.config["dataset"])
    # A bundle keeps the last part of a path, which may be something else in this folder.
    field = next((field for field in PATHS["dataset"] if spec.get(field)), None)
    if field is not None and not root:
        raise ValueError(
            f"--split={name} needs --root=PATH: the bundle was trained on {spec['name']!r} in "
            f"{spec[field]!r}, and does not store the full path"
        )
    if root:
        spec[field or "root"] = root
    split = getattr(load(spec), name)
    try:
        count = image_files.write(split, folder, about={"dataset": spec, "split": name})
    except OSError as error:
        raise OSError(f"--images={folder} cannot be written: {error.strerror or error}") from None
    print(f"wrote {counted(count, 'image')} to {folder}")
