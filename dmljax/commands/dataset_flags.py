"""The flags that name a data set, for every verb that reads one."""

import argparse
from typing import Any

from dmljax.config import registry
from dmljax.data.splits import Splits
from dmljax.hints import counted

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
    """Returns the data set of parsed flags as a config has it: `dict(name=..., root=...)`."""
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
    """Loads the data set of a spec. The error about a missing argument names it."""
    try:
        return registry.resolve("dataset", spec)()
    except TypeError as error:
        message = str(error).replace("missing 1 required keyword-only argument", "also needs")
        raise ValueError(message) from error


def write_split(bundle: Any, name: str, root: str | None, folder: str) -> None:
    """Writes the images of a split of the data set in the bundle's config to a folder."""
    from dmljax.config.fields import PATHS
    from dmljax.data import image_files

    if name not in ("train", "test"):
        raise ValueError(f"--split={name} is unknown: choose train or test")
    spec = dict(bundle.manifest.config["dataset"])
    # A bundle keeps the last part of a path, which may be something else in this folder.
    field = next((field for field in PATHS["dataset"] if spec.get(field)), None)
    if field is not None and not root:
        raise ValueError(
            f"--split={name} needs --root=PATH: the bundle was trained on {spec['name']!r} in "
            f"{spec[field]!r}, and keeps no more of its path"
        )
    if root:
        spec[field or "root"] = root
    try:
        splits = load(spec)
    except (ValueError, OSError) as error:
        more = "" if root else " (--root=PATH says where the data set is)"
        raise ValueError(f"{error}{more}") from None
    about = {"dataset": spec, "split": name}
    try:
        count = image_files.write(getattr(splits, name), folder, about=about)
    except OSError as error:
        reason = error.strerror or error
        raise OSError(f"--images={folder} cannot be written: {reason}") from None
    print(f"wrote {counted(count, 'image')} to {folder}")
