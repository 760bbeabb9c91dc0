"""Check a bundle, or make new programs for an old one.

    dmljax bundle check photos.bundle
    dmljax bundle check photos.bundle --signed-by=public.pem
    dmljax bundle rebuild photos.bundle --out=new.bundle

`check` compares all files with their digests, the pixels of the stored images, and the embeddings
of the program with the stored ones, and prints the identity: the digest of everything in the
bundle, thresholds too. With --signed-by, the owner of this public key (Ed25519) must have signed
it: `dmljax export --sign=key.pem`. `rebuild` makes programs for the JAX that is installed here,
from the config and the parameters of the bundle; the model digest stays.
"""

import argparse
from collections.abc import Sequence

from dmljax.commands.parser import add_trust, refuse

_REBUILD = "`dmljax bundle rebuild` writes one that has it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("check", "rebuild"))
    parser.add_argument("bundle", help="folder of a bundle, such as photos.bundle")
    parser.add_argument("--out", help="rebuild: the folder to write")
    parser.add_argument("--signed-by", help="check: PEM file of the public key of its writer")
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
    from dmljax.bundle import files, loading, signing

    bundle = loading.load(arguments.bundle)
    if arguments.signed_by:
        signing.check(bundle.folder, bundle.manifest, arguments.signed_by)
        print(f"signed by the owner of {arguments.signed_by}")
    programs, skipped = {"stablehlo": bundle}, None
    if files.ONNX in bundle.manifest["files"]:
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
    print(f"{arguments.bundle}: {len(bundle.manifest['files'])} files as in the manifest")
    print(f"model {bundle.digest}")
    older = f"none: an older bundle, whose thresholds no digest covers; {_REBUILD}"
    print(f"identity {bundle.manifest.get('identity', older)}")
    return 0
