"""Writes a data set once in a form that is small and quick to read.

    python -m dmljax.commands.prepare --dataset=cars196 --root=stanford_cars --out=cars256

resizes every image (shorter side 256) and stores it as JPEG in ArrayRecord shards, together with a
manifest of counts, labels, hashes and settings. Train on it with `--config.dataset.name=prepared`
and `--config.dataset.root=cars256`. If the command is interrupted, run it again: it continues. The
manifest is written last, so a folder that has one is complete. `--geometry` is `shorter`, `squash`
(DVML) or `pad` (ABE). JPEGs that are small enough already are copied byte for byte.
"""

from __future__ import annotations

from collections.abc import Sequence

from dmljax.commands import common
from dmljax.data import prepare

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """Prepares the data set that the flags name; returns the exit status."""
    parser = common.Parser("dmljax.commands.prepare", __doc__)
    common.add_dataset_flags(parser)
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--size", type=int, default=256, help="of the shorter side or the square")
    parser.add_argument("--geometry", default="shorter", help=", ".join(prepare.GEOMETRIES))
    parser.add_argument("--quality", type=int, default=90, help="of the JPEGs")
    parser.add_argument("--unreadable", default="raise", help="raise (default) or skip and report")
    parser.add_argument("--shard_size", type=int, default=1024, help="images per shard")
    parser.add_argument("--threads", type=int, help="by default one per core")
    args = parser.parse_args(argv)
    spec = common.dataset_of_flags(args)
    options = ("out", "size", "geometry", "quality", "unreadable", "shard_size", "threads")
    manifest = prepare.prepare(
        common.load(spec),
        settings={"dataset": spec},
        **{name: getattr(args, name) for name in options},
    )
    for name, split in manifest["splits"].items():
        size = sum(shard["bytes"] for shard in split["shards"]) / 2**20
        note = f", {len(split['skipped'])} skipped" if split["skipped"] else ""
        counts = f"{split['count']} images of {split['classes']} classes"
        print(f"{name}: {counts}, {size:.1f} MiB{note}")
    print(f"train on it with --config.dataset.name=prepared --config.dataset.root={args.out}")
    return 0


if __name__ == "__main__":
    common.run(main)
