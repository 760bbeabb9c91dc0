"""Score pretrained backbones on your images, without any training.

    dmljax zero-shot photos/
    dmljax zero-shot photos/ --nets=dinov2_s14,siglip2_b16_224,mobilenet_v2
    dmljax zero-shot photos/ --nets=dinov2_s14 --weights=downloads/

photos/ has a folder for each class, or folders query/ and gallery/ with such folders. The table
shows R@1 and MAP@R with intervals over classes, and the paired difference to the best row. The
page, the same with pictures, is report.html in --out, by default runs/zero-shot/ and the name of
the folder: runs/zero-shot/photos. Without --nets, all backbones on this machine are taken: files in
--weights, downloaded ones, installed packages. `dmljax weights` lists all. A file in --weights
needs the name that `dmljax weights explain NAME` says: clip_b32.safetensors.

Images without class folders get no scores. The page then has a map, near duplicates, and clusters
by the first backbone.

The features are kept on disk, so that a second command starts with the table. --shard=I/N computes
part I of N of them only: start N such processes, then the command without it.
"""

import argparse
import collections
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from dmljax.commands.parser import at_least_one, refuse
from dmljax.hints import check_known

_OUT = pathlib.Path("runs/zero-shot")
_WEIGHTS = (".safetensors", ".pth", ".pt", ".bin", ".caffemodel", ".onnx")  # names of files end so


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", nargs="?", help="folder of images")
    parser.add_argument("--nets", help="names of published weights, separated by commas")
    parser.add_argument("--weights", help="a folder with files of published weights")
    parser.add_argument("--out", help="folder of the page; runs/zero-shot/NAME by default")
    parser.add_argument("--cache", help="folder of the features; $DMLJAX_CACHE/features by default")
    parser.add_argument("--shard", help="I/N: only part I of N parts of the features, such as 0/8")
    parser.add_argument(
        "--batch-size", type=at_least_one, default=32, help="images at a time; 32 by default"
    )


def run(arguments: argparse.Namespace, extras: Sequence[str]) -> int:
    refuse("zero-shot", extras)
    if not arguments.folder:
        raise ValueError("zero-shot needs a folder of images: dmljax zero-shot photos/")
    from dmljax.data.splits import warn_of_one_class
    from dmljax.files import parts
    from dmljax.runs import zero_shot
    from dmljax.train import compilation

    compilation.keep_programs_or_warn()
    shard = parts.parse(arguments.shard) if arguments.shard else None
    out = arguments.out or str(_OUT / pathlib.Path(arguments.folder).resolve().name)
    if shard is None:
        zero_shot.check_out(out)
    images, are_labeled = zero_shot.images_of_folder(arguments.folder)
    backbones = _backbones(arguments)
    options = {"cache": arguments.cache, "shard": shard, "batch_size": arguments.batch_size}
    options["skipped"] = collections.Counter()  # so that every image is named once
    if not are_labeled:
        if len(backbones) > 1:
            names = ", ".join(backbone.name for backbone in backbones[1:])
            print(
                f"images without classes are grouped by one backbone, {backbones[0].name}; not "
                f"used: {names} (--nets=NAME names another)"
            )
        row = zero_shot.embed(backbones[0], images, **options)
        if row is not None:
            _print_unreadable(row)
            clusters, duplicates = zero_shot.page_of_clusters(row, images, out)
            print(
                f"{len(images):,} images without classes: {clusters} clusters, {duplicates} near "
                f"duplicates by {row.name}; {out}/report.html, clusters.csv"
            )
        return 0
    warn_of_one_class(images, arguments.folder)
    results = [zero_shot.embed(backbone, images, **options) for backbone in [*backbones, None]]
    rows = [row for row in results if row is not None]
    if rows:
        _print_unreadable(rows[0])
        _print(rows, zero_shot.score(rows, images, out))
        print(f"page: {out}/report.html")
    return 0


def _backbones(arguments: argparse.Namespace) -> list[Any]:
    """The backbones of --nets, or all that are on this machine; says which ones are missing."""
    from dmljax import at_hand, weights
    from dmljax.runs.zero_shot import Backbone

    paths = at_hand.weights_at_hand(arguments.weights)
    if arguments.weights:
        _print_unused(pathlib.Path(arguments.weights), set(paths.values()))
    names = arguments.nets.split(",") if arguments.nets else list(paths)
    check_known("--nets: there is no", names, weights.PUBLISHED)
    for name in names:
        if name not in paths:
            print(
                f"{name} is left out, its weights are not here: {weights.get_command(name)}, or "
                f"--weights=FOLDER with {weights.file_name(name)}",
                file=sys.stderr,
            )
    backbones = [Backbone(name, paths[name]) for name in names if name in paths]
    if not backbones and arguments.nets:
        raise FileNotFoundError(f"--nets={arguments.nets}: the weights of none of them are here")
    if not backbones:
        raise FileNotFoundError(f"no pretrained backbone is here: {at_hand.GET_BACKBONE}")
    return backbones


def _print_unused(folder: pathlib.Path, used: set[pathlib.Path]) -> None:
    """Says which files of weights of the folder have no published name; raises if all of them."""
    files = {path for path in folder.iterdir() if path.suffix in _WEIGHTS}
    if unused := sorted(path.name for path in files - used):
        names = ", ".join(unused[:5]) + (f" and {len(unused) - 5} more" if unused[5:] else "")
        text = (
            f"--weights={folder}: not used: {names}. The name of the file says what it is, such as "
            'clip_b32.safetensors: `dmljax weights explain NAME` has the name under "get it"'
        )
        if not files & used:
            raise ValueError(text)
        print(text, file=sys.stderr)
    elif not files:
        endings = ", ".join(_WEIGHTS)
        raise FileNotFoundError(f"--weights={folder} has no file of weights ({endings})")


def _print_unreadable(row: Any) -> None:
    """Says how many images are left out, also where their features come from disk."""
    if count := row.unreadable:
        print(f"images that could not be read and are left out: {count:,}")


def _print(rows: Sequence[Any], result: Any) -> None:
    from dmljax.report import text
    from dmljax.runs.zero_shot import seconds_text

    by_name = {row.name: row for row in rows}
    scores = {name: result.scores[name] for name in ("R@1", "MAP@R")}
    text.show(text.comparison(result._replace(scores=scores)))
    for name in result.runs:
        row = by_name[name]
        about = f"{row.preprocessing}; {row.width:,} dimensions; {seconds_text(row)} s/image"
        print(f"{name}: {about}" + (f"; {row.license}" if row.license else ""))
