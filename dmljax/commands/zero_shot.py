"""Score pretrained backbones on your images, without any training.

    dmljax zero-shot photos/
    dmljax zero-shot photos/ --nets=dinov2_s14,siglip2_b16_224,mobilenet_v2
    dmljax zero-shot photos/ --nets=dinov2_s14 --weights=downloads/

photos/ has one folder per class, or folders query/ and gallery/ with such folders. The table shows
R@1 and MAP@R with intervals over classes, and the paired difference to the best row. The page,
report.html in --out, shows the same with pictures. Without --nets, the command scores all backbones
on this machine: files in --weights, downloaded files and installed packages. `dmljax weights` lists
all backbones. A file in --weights must have its published name (`dmljax weights explain NAME`),
such as clip_b32.safetensors.

Images without class folders get no scores. The page then shows a map, near duplicates, and clusters
of the features of the first backbone.

The features are cached in $DMLJAX_CACHE/features. --shard=I/N computes only part I of N of them:
start N such processes, then the command without --shard.
"""

import argparse
import collections
import dataclasses
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from dmljax.commands.parser import SHARD, add_fields, flag, refuse
from dmljax.hints import check_known

_OUT = pathlib.Path("runs/zero-shot")


@dataclasses.dataclass(frozen=True)
class Flags:
    """Flags of zero-shot scores."""

    nets: str | None = flag(None, "names of published weights, separated by commas")
    weights: str | None = flag(None, "folder with files of published weights")
    out: str | None = flag(None, "folder to write the page to; runs/zero-shot/NAME by default")
    shard: str | None = flag(None, "compute only part I of N of the features", **SHARD)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", help="folder of images")
    add_fields(parser, Flags)


def run(arguments: argparse.Namespace, extras: Sequence[str]) -> int:
    refuse("zero-shot", extras)
    if not arguments.folder:
        raise ValueError("zero-shot needs a folder of images: dmljax zero-shot photos/")
    from dmljax.data.splits import warn_of_one_class
    from dmljax.runs import zero_shot
    from dmljax.train import compilation

    compilation.keep_programs()
    out = arguments.out or str(_OUT / pathlib.Path(arguments.folder).resolve().name)
    images, are_labeled = zero_shot.images_of_folder(arguments.folder)
    backbones: dict[str, pathlib.Path | None] = _backbones(arguments)
    if are_labeled:
        warn_of_one_class(images, arguments.folder)
        backbones[zero_shot.PIXELS] = None
    elif len(backbones) > 1:
        first, *others = backbones
        print(
            f"images without classes are grouped by one backbone, {first}; not used: "
            f"{', '.join(others)} (--nets=NAME names another)"
        )
        backbones = {first: backbones[first]}
    # One counter, so that each unreadable image is named once.
    options: dict[str, Any] = {"shard": arguments.shard, "skipped": collections.Counter()}
    results = [zero_shot.embed(*backbone, images, **options) for backbone in backbones.items()]
    rows = [row for row in results if row is not None]
    if not rows:  # a shard
        return 0
    if count := int((~rows[0].is_readable).sum()):  # also if the features come from the cache
        print(f"images that could not be read and are left out: {count:,}")
    if are_labeled:
        _print(rows, zero_shot.score(rows, images, out))
        print(f"page: {out}/report.html")
        return 0
    clusters, duplicates = zero_shot.page_of_clusters(rows[0], images, out)
    print(
        f"{len(images):,} images without classes: {clusters} clusters, {duplicates} near "
        f"duplicates by {rows[0].name}; {out}/report.html, clusters.csv"
    )
    return 0


def _backbones(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the weights of --nets, or all on this machine; prints which ones are missing."""
    from dmljax import at_hand, weights

    paths = at_hand.weights_at_hand(arguments.weights)
    names = arguments.nets.split(",") if arguments.nets else list(paths)
    check_known("--nets: there is no", names, weights.PUBLISHED)
    for name in [name for name in names if name not in paths]:
        command = weights.published.get_command(name)
        print(
            f"{name} is left out, its weights are not here: {command}, or --weights=FOLDER with "
            f"{weights.published.file_name(name)}",
            file=sys.stderr,
        )
    if not (backbones := {name: paths[name] for name in names if name in paths}):
        raise FileNotFoundError(f"no pretrained backbone is here: {at_hand.GET_BACKBONE}")
    return backbones


def _print(rows: Sequence[Any], result: Any) -> None:
    from dmljax.report import text

    by_name = {row.name: row for row in rows}
    scores = {name: result.scores[name] for name in ("R@1", "MAP@R")}
    text.show(text.comparison(result._replace(scores=scores)))
    for row in (by_name[name] for name in result.runs):
        seconds = "" if row.seconds is None else f"{row.seconds_text} s/image"
        dimensions = f"{row.embeddings.shape[1]:,} dimensions"
        facts = row.preprocessing, row.license, dimensions, seconds
        print(f"{row.name}: {'; '.join(filter(None, facts))}")
