"""Resize the images of a data set once, and store them for fast reading.

    dmljax prepare --dataset=cars196 --root=stanford_cars --out=cars256
    dmljax train --config=configs/cars_abe.py \\
        --config.dataset="{'name': 'prepared', 'root': 'cars256'}"

The command resizes every image (shorter side 256) and stores it as JPEG in ArrayRecord shards, with
a manifest of counts, labels, hashes and settings. The same command continues after an interruption.
The manifest is written last, so a folder with a manifest is complete. --geometry is shorter, squash
(DVML) or pad (ABE). JPEGs that are small enough are copied byte for byte. Arguments of the data set
are flags: --root=FOLDER, --path=FILE, --split=0.5 or --split=CLASS,CLASS.
"""

import argparse
import inspect
from collections.abc import Sequence

from dmljax.commands.dataset_flags import add_dataset, dataset_of, load
from dmljax.data import prepare
from dmljax.hints import counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_dataset(parser)
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument(
        "--size", type=int, help="pixels of the shorter side, or of both sides (%(default)s)"
    )
    parser.add_argument("--geometry", help=f"{', '.join(prepare.GEOMETRIES)} (%(default)s)")
    parser.add_argument("--quality", type=int, help="JPEG quality (%(default)s)")
    parser.add_argument("--unreadable", help="images that cannot be read: raise (default) or skip")
    parser.add_argument("--shard_size", type=int, help="images per shard (%(default)s)")
    options = inspect.signature(prepare.prepare).parameters.values()
    parser.set_defaults(**{p.name: p.default for p in options if p.default != p.empty})


def run(arguments: argparse.Namespace, extras: Sequence[str]) -> int:
    spec = dataset_of("prepare", arguments.dataset, extras)
    options = ("out", "size", "geometry", "quality", "unreadable", "shard_size")
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
