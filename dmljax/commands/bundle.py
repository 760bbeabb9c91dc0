"""Check a bundle.

    dmljax bundle check photos.bundle

The check compares all files with their hashes, the preprocessed pixels of the stored images, and
the embeddings of every program with the stored ones. It prints the identity: the hash of everything
in the bundle, including the thresholds.
"""

import argparse
from collections.abc import Sequence

from dmljax.commands.parser import refuse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("check",))
    parser.add_argument("bundle", help="folder of a bundle, such as photos.bundle")


def run(arguments: argparse.Namespace, extras: Sequence[str]) -> int:
    refuse("bundle", extras)
    from dmljax.bundle import files, loading

    bundle = loading.load(arguments.bundle)
    programs, skipped = {"stablehlo": bundle}, None
    if files.ONNX in bundle.manifest.files:
        try:
            programs["onnx"] = loading.load(arguments.bundle, program="onnx")
        except ImportError as error:
            skipped = f"onnx: only its digest was checked. {error}"
    for name, loaded in programs.items():
        report = loaded.check()
        print(
            f"{name}: the stored embeddings differ by {report['largest_difference']:.1e} at most, "
            f"smallest cosine {report['smallest_cosine']:.7f}"
        )
    if skipped:
        print(skipped)
    print(f"{arguments.bundle}: {len(bundle.manifest.files)} files as in the manifest")
    print(f"model {bundle.digest}")
    print(f"identity {bundle.manifest.identity}")
    return 0
