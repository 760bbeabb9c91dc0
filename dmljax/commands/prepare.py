"""Write a data set once in a form that is small and quick to read.

    dmljax prepare --dataset=cars196 --root=stanford_cars --out=cars256
    dmljax train --config=configs/cars_abe.py \\
        --config.dataset="{'name': 'prepared', 'root': 'cars256'}"

Resizes every image (shorter side 256) and stores it as JPEG in ArrayRecord shards, together with a
manifest of counts, labels, hashes and settings. If the command is interrupted, run it again: it
continues. The manifest is written last, so a folder that has one is complete. --geometry is
shorter, squash (DVML) or pad (ABE). JPEGs that are small enough already are copied byte for byte.
"""

import argparse
import inspect
from collections.abc import Sequence

from dmljax.commands.dataset_flags import add_dataset_flags, dataset_of_flags, load
from dmljax.commands.parser import at_least_one, refuse
from dmljax.data import prepare
from dmljax.hints import counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_dataset_flags(parser)
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--size", type=int, help="pixels of a side: the shorter one, or each")
    parser.add_argument("--geometry", help=", ".join(prepare.GEOMETRIES))
    parser.add_argument("--quality", type=int, help="quality of the JPEGs (%(default)s)")
    parser.add_argument("--unreadable", help="raise (default) or skip and report")
    parser.add_argument("--shard_size", type=at_least_one, help="images per shard (%(default)s)")
    parser.add_argument("--threads", type=at_least_one, help="by default one per core")
    options = inspect.signature(prepare.prepare).parameters.values()
    parser.set_defaults(**{p.name: p.default for p in options if p.default != p.empty})


def run(arguments: argparse.Namespace, extras: Sequence[str]) -> int:
    refuse("prepare", extras)
    spec = dataset_of_flags(arguments)
    options = ("out", "size", "geometry", "quality", "unreadable", "shard_size", "threads")
    manifest = prepare.prepare(
        load(spec),
        settings={"dataset": spec},
        **{name: getattr(arguments, name) for name in options},
    )
    for name, split in manifest["splits"].items():
        size = sum(shard["bytes"] for shard in split["shards"]) / 2**20
        note = f", {len(split['skipped'])} skipped" if split["skipped"] else ""
        counts = f"{counted(split['count'], 'image')} of {counted(split['classes'], 'class')}"
        print(f"{name}: {counts}, {size:.1f} MiB{note}")
    # The data set as a whole: the config may give it arguments that `prepared` does not have.
    dataset = {"name": "prepared", "root": arguments.out}
    print(f'train on it with --config.dataset="{dataset}"')
    return 0
