"""Write a bundle: one folder with program, parameters, preprocessing and model card.

    dmljax export runs/photos --out=photos.bundle
    dmljax export runs/photos --out=photos.bundle --onnx --batch-sizes=1,8,32

The programs run in new processes on up to 256 test images. If one of them differs from the
checkpoint, the exit status is 2 and no bundle is written. In Python:
dmljax.bundle.load("photos.bundle").embed(["a.jpg"]). docs/ship.md describes the files.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from dmljax.commands import evaluate
from dmljax.commands.parser import batch_sizes

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    evaluate.add_run(parser)
    parser.add_argument("--out", help="folder to write, such as photos.bundle")
    parser.add_argument("--onnx", action="store_true", help="add the program as ONNX")
    parser.add_argument("--license", help="license of the bundle, for its card")
    parser.add_argument(
        "--batch-sizes", help="sizes that are compiled, such as 1,8,32 (docs/serve.md)"
    )


def run(arguments: argparse.Namespace, extras: Sequence[str]) -> int:
    folder = evaluate.run_folder("export", arguments)
    overrides = evaluate.overrides_of("export", extras)
    if not arguments.out:
        raise ValueError("export needs --out, the folder to write, such as photos.bundle")
    sizes = batch_sizes(arguments.batch_sizes)
    from dmljax.bundle import exporting

    bundle = exporting.export(
        folder,
        arguments.out,
        step=arguments.step,
        onnx=arguments.onnx,
        license=arguments.license,
        overrides=overrides,
        batch_sizes=sizes or exporting.BATCH_SIZES,
    )
    size = sum(path.stat().st_size for path in bundle.iterdir())
    print(
        f"{bundle}: {size / 1e6:.1f} MB; every program gives the embeddings of the checkpoint "
        "(README.md, parity.json)"
    )
    return 0
