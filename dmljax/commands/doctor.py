"""Check that a data set on disk is complete and correct.

    dmljax doctor --dataset=cub200 --root=CUB_200_2011
    dmljax doctor --config=configs/cars_abe.py --config.dataset.root=stanford_cars

The command reads every image and prints one line per finding: ok, note, or WRONG. The exit status
is 1 if anything is wrong, and 2 if the data set cannot be opened. Arguments of the data set are
flags: --root=FOLDER, --path=FILE, --split=0.5 or --split=CLASS,CLASS.
"""

import argparse
import itertools
from collections.abc import Sequence
from typing import Any

from dmljax.commands.dataset_flags import add_dataset, dataset_of, load
from dmljax.config import files as config_files
from dmljax.config.fields import named
from dmljax.data import doctor, prepare


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", help="a config; its data set is checked")
    add_dataset(parser)


def run(arguments: argparse.Namespace, extras: Sequence[str]) -> int:
    if arguments.config:
        spec = named(config_files.read(arguments.config, extras).get("dataset") or "")
    else:
        spec = dataset_of("doctor", arguments.dataset, extras)
    splits = load(spec)
    findings = doctor.examine(splits, dataset=_published_name(spec))
    if spec["name"] == "prepared":
        findings = itertools.chain(doctor.examine_shards(spec["root"]), findings)
    wrong = 0
    for finding in findings:
        print(f"{finding.level:5s}  {finding.text}", flush=True)
        wrong += finding.level == "WRONG"
    print(f"{wrong} wrong" if wrong else "nothing is wrong")
    return 1 if wrong else 0


def _published_name(spec: dict[str, Any]) -> str:
    """Returns the data set whose published counts apply, or ''. A prepared one has a source."""
    if spec["name"] == "prepared":
        return prepare.manifest(spec["root"])["settings"].get("dataset", {}).get("name", "")
    # No counts are published for a subset of MNIST's classes.
    return "" if spec.get("classes") else spec["name"]
