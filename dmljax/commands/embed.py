"""Write the embeddings of a split of a run, or of a collection of images.

    dmljax embed runs/glyphs --out=embeddings/
    dmljax embed runs/glyphs --out=embeddings/ --split=train --dtype=float16
    dmljax embed runs/glyphs --out=embeddings/ --shard=3/8
    dmljax embed photos.bundle --images=list.parquet --out=vectors/ --shard=3/8
    dmljax embed --net=dinov2_s14 --weights=model.safetensors --images=photos/ --out=vectors/
    dmljax embed photos.bundle --images=photos/ --out=vectors/ --prefix=64
    dmljax embed runs/cars_dvml --out=features/ --synthetic

The command writes embeddings.npy and items.safetensors: the labels, and query, gallery and groups
if the split has them; ids and class names are JSON in its metadata. --synthetic also writes the
synthetic features of a dvml run. --prefix=64 writes the first 64 dimensions as unit vectors, if the
run was trained with method.prefixes. The same command continues after an interruption.

--shard=I/N embeds the rows [I n/N, (I+1) n/N) into part-I-of-N/. Start N such processes anywhere.
Concatenated, the parts equal the output of one process bitwise (docs/scale.md).

With a bundle or --net (a published backbone without training), --images is a folder or a Parquet
file with a column `path` and an optional column `id`. The parts are then Parquet files of ids,
metadata and vectors for `dmljax index create photos.index --bundle=... --import=vectors/`. Images
that cannot be read, or whose embedding has NaN, are listed in left_out.jsonl of their part.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from dmljax.commands import evaluate, export
from dmljax.commands.parser import SHARD, add_fields, flag, given, leave_out, refuse, values_of
from dmljax.files import parts
from dmljax.hints import counted


@dataclasses.dataclass(frozen=True)
class Flags:
    """Arguments of both functions that embed."""

    prefix: int | None = flag(None, "write only the first PREFIX dimensions (Matryoshka)", type=int)
    shard: str | None = flag(None, "embed only part I of N of the rows", **SHARD)


@dataclasses.dataclass(frozen=True)
class RunFlags:
    """Arguments of the function that embeds a split of a run."""

    dtype: str = flag("float32", "number type: float32 or float16")
    synthetic: bool = flag(False, "also write synthetic features (runs of dvml)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    evaluate.add_run(parser, split=True)
    parser.add_argument("--out", help="folder to write")
    parser.add_argument("--images", help="with a bundle or --net: folder or Parquet list of images")
    for kind in (Flags, RunFlags, export.BackboneFlags):
        add_fields(parser, kind)


def run(arguments: argparse.Namespace, extras: Sequence[str]) -> int:
    options = values_of(arguments, Flags)
    if arguments.images:
        return _embed_collection(arguments, extras, options)
    leave_out(given(arguments, "net", "weights"), "without --images, a run is embedded")
    folder, checkpoint = evaluate.run_of("embed", arguments, extras)
    if not arguments.out:
        raise ValueError("embed needs --out, the folder to write")
    from dmljax.runs import export as run_export

    options |= values_of(arguments, RunFlags) | checkpoint
    written = run_export.embeddings(folder, arguments.out, split=arguments.split, **options)
    text = f"{written.folder}: {written.images:,} embeddings"
    if written.unreadable:
        text += f", {counted(written.unreadable, 'NaN row')} (no readable image)"
    if shard := arguments.shard:
        text += f"; {written.finished_parts:,} of {shard.count:,} parts are complete"
    print(text)
    return 0


def _embed_collection(
    arguments: argparse.Namespace, extras: Sequence[str], options: dict[str, Any]
) -> int:
    refuse("embed", extras)
    if bool(arguments.run) == bool(arguments.net) or not arguments.out:
        raise ValueError(
            "--images needs a bundle or --net, and --out: dmljax embed photos.bundle "
            "--images=collection/ --out=vectors/"
        )
    flags = given(arguments, "split", "step", RunFlags)
    leave_out(flags, "--images is embedded by a bundle, not by a run")
    if not arguments.net:
        leave_out(given(arguments, "weights"), "a bundle has its weights")
    from dmljax.bundle import backbones, collection
    from dmljax.train import compilation

    compilation.keep_programs()
    bundle, options["shard"] = arguments.run, arguments.shard or parts.Shard(0, 1)
    if arguments.net:
        weights = backbones.weights_of(arguments.net, arguments.weights)
        bundle = backbones.opened(arguments.net, weights)
    facts = collection.embed(bundle, arguments.images, arguments.out, **options)
    (first, stop), left_out, folder = facts["rows"], facts["left_out"], facts["folder"]
    count = options["shard"].count
    parts_text = f"{count - len(facts['missing']):,} of {count:,} parts are complete"
    print(f"{folder}: {stop - first - left_out:,} embeddings; {parts_text}")
    if left_out:
        print(f"left out: {left_out:,}, see {folder}/{collection.LEFT_OUT}", file=sys.stderr)
    return 0
