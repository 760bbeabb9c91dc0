"""Check a bundle, or make new programs for an old one.

    dmljax bundle check photos.bundle
    dmljax bundle rebuild photos.bundle --out=new.bundle

`check` compares all files with their digests, the pixels of the stored images, and the embeddings
of the program with the stored ones. `rebuild` makes programs for the JAX that is installed here,
from the config and the parameters of the bundle; the model digest stays.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from dmljax.commands.parser import add_trust, refuse

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("check", "rebuild"))
    parser.add_argument("bundle", help="folder of a bundle, such as photos.bundle")
    parser.add_argument("--out", help="rebuild: the folder to write")
    parser.add_argument("--onnx", action="store_true", help="rebuild: add the program as ONNX")
    add_trust(parser)


def run(arguments: argparse.Namespace, extras: Sequence[str]) -> int:
    refuse("bundle", extras)
    if arguments.action == "rebuild":
        if not arguments.out:
            raise ValueError("rebuild needs --out, the folder to write, such as new.bundle")
        from dmljax.bundle import rebundling

        path = rebundling.rebundle(arguments.bundle, arguments.out, onnx=arguments.onnx)
        print(f"{path}: new programs, which give the stored embeddings")
        return 0
    from dmljax.bundle import files, loading

    bundle = loading.load(arguments.bundle)
    programs = {"stablehlo": bundle}
    if files.ONNX in bundle.manifest["files"]:
        programs["onnx"] = loading.load(arguments.bundle, program="onnx")
    for name, loaded in programs.items():
        report = loaded.check()
        print(
            f"{name}: the stored embeddings differ by {report['largest_difference']:.1e} at most, "
            f"smallest cosine {report['smallest_cosine']:.7f}"
        )
    print(f"{arguments.bundle}: {len(bundle.manifest['files'])} files as in the manifest")
    print(f"model {bundle.digest}")
    return 0
