"""Write the embeddings of a split, their labels and names.

    dmljax embed runs/glyphs --out=embeddings/
    dmljax embed runs/glyphs --out=embeddings/ --split=train --dtype=float16

The folder gets embeddings.npy and items.safetensors: labels, and masks of query and gallery where
the split has them; ids and class names are JSON in its metadata. If the command is
interrupted, run it again: it continues.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from dmljax.commands import evaluate

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    evaluate.add_checkpoint(parser)
    parser.add_argument("--out", help="folder to write")
    parser.add_argument("--dtype", default="float32", help="float32 (default) or float16")


def run(arguments: argparse.Namespace, extras: Sequence[str]) -> int:
    folder = evaluate.run_folder("embed", arguments)
    overrides = evaluate.overrides_of("embed", extras)
    if not arguments.out:
        raise ValueError("embed needs --out, the folder to write")
    from dmljax.train import export

    export.export(
        folder,
        arguments.out,
        split=arguments.split,
        step=arguments.step,
        dtype=arguments.dtype,
        overrides=overrides,
    )
    return 0
