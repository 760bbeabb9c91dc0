"""Checks that a data set on disk is complete and correct.

    python -m dmljax.commands.doctor --dataset=cub200 --root=CUB_200_2011
    python -m dmljax.commands.doctor --config=configs/cars_abe.py --config.dataset.root=cars

reads every image and prints one line per finding: `ok`, `note`, or `WRONG`. The exit status is 1 if
anything is wrong, and 2 if the data set cannot be opened at all.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from dmljax.commands import common
from dmljax.data import doctor, prepared

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """Examines the data set that the flags name; returns the exit status."""
    parser = common.Parser("dmljax.commands.doctor", __doc__)
    parser.add_argument("--config", help="a config file whose config.dataset is examined")
    common.add_dataset_flags(parser)
    parser.add_argument("--threads", type=int, help="by default one per core")
    args, overrides = parser.parse_known_args(argv)
    if args.config:
        spec = common.dataset_of_config(args.config, overrides)
    elif overrides:
        parser.error(f"{overrides[0]} is not known")
    else:
        spec = common.dataset_of_flags(args)
    splits = common.load(spec)
    findings = doctor.examine(splits, dataset=_published_name(spec), threads=args.threads)
    if spec["name"] == "prepared":
        findings = itertools.chain(doctor.examine_shards(spec["root"]), findings)
    wrong = 0
    for finding in findings:
        print(f"{finding.level:5s}  {finding.text}", flush=True)
        wrong += finding.level == "WRONG"
    print(f"{wrong} wrong" if wrong else "nothing is wrong")
    return 1 if wrong else 0


def _published_name(spec: dict[str, Any]) -> str:
    """The data set whose published counts apply, or ''. A prepared one counts as its source."""
    if spec["name"] == "prepared":
        return prepared.manifest(spec["root"])["settings"].get("dataset", {}).get("name", "")
    # There are no published counts for some classes of MNIST only.
    return "" if spec.get("classes") else spec["name"]


if __name__ == "__main__":
    common.run(main)
