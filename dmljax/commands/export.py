"""Write a bundle: one folder with program, parameters, preprocessing and model card.

    dmljax export runs/photos --out=photos.bundle
    dmljax export runs/photos --out=photos.bundle --onnx --batch-sizes=1,8,32
    dmljax export --net=dinov2_s14 --weights=model.safetensors --out=dino.bundle
    dmljax export runs/photos --adapter --out=adapter

The programs run in new processes on up to 256 test images. If one of them differs from the
checkpoint, the exit status is 2 and no bundle is written. The same holds for a run from pretrained
weights that scores below its backbone without training, on held-out classes or else on the test
split, unless --allow-worse is given. In Python:
dmljax.bundle.load("photos.bundle").embed(["a.jpg"]). docs/ship.md describes the files.

--net exports a published backbone (`dmljax weights`) without training. Without --weights, the
command uses the downloaded or installed file. A file of CLIP or SigLIP 2 with its text tower makes
a bundle that also embeds text, if --vocabulary names its tokenizer.json, or the file lies next to
the weights (`dmljax weights --fetch` downloads it as NAME.tokenizer.json). It needs dmljax[text]:
dmljax search BUNDLE --index=... --text="red shoe".

--adapter writes only the adapters of a run with trained=lora, as a folder for the package peft.
"""

import argparse
import pathlib
from collections.abc import Sequence

from dmljax.commands import evaluate
from dmljax.commands.parser import batch_sizes, refuse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    evaluate.add_run(parser)
    add_backbone(parser)
    parser.add_argument(
        "--allow-worse",
        action="store_true",
        help="export even if the run scores below its backbone without training",
    )
    parser.add_argument("--out", help="folder to write, such as photos.bundle")
    parser.add_argument("--vocabulary", help="tokenizer.json of the net, to embed text")
    parser.add_argument("--onnx", action="store_true", help="also write the program as ONNX")
    parser.add_argument(
        "--adapter", action="store_true", help="write only the LoRA adapter, for peft"
    )
    parser.add_argument("--license", help="license to name in the model card")
    parser.add_argument(
        "--batch-sizes",
        type=batch_sizes,
        metavar="SIZES",
        help="batch sizes to compile, such as 1,8,32",
    )


def add_backbone(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that name a published backbone instead of a run or a bundle."""
    parser.add_argument("--net", help="published backbone without training, such as dinov2_s14")
    parser.add_argument("--weights", help="file with the weights of --net")


def _export_backbone(arguments: argparse.Namespace, extras: Sequence[str]) -> pathlib.Path:
    refuse("export", extras)
    for_runs = (arguments.run, arguments.adapter, arguments.allow_worse)
    if any(for_runs) or arguments.step is not None:
        raise ValueError(
            "--net exports a backbone without a run: leave out the run, --step, --adapter and "
            "--allow-worse"
        )
    from dmljax.bundle import backbones

    return backbones.export(
        arguments.net,
        arguments.weights,
        arguments.out,
        onnx=arguments.onnx,
        license=arguments.license,
        vocabulary=arguments.vocabulary,
        batch_sizes=arguments.batch_sizes or backbones.exporting.BATCH_SIZES,
    )


def _export_run(arguments: argparse.Namespace, extras: Sequence[str]) -> pathlib.Path:
    for flag in ("weights", "vocabulary"):
        if getattr(arguments, flag):
            raise ValueError(f"--{flag} belongs to --net: leave it out, or name the net")
    folder = evaluate.run_folder("export", arguments.run)
    overrides = evaluate.overrides_of("export", extras)
    if arguments.adapter:
        if arguments.onnx or arguments.license or arguments.batch_sizes:
            raise ValueError("--adapter writes no program and no card: leave out the other flags")
        from dmljax.runs import adapters

        return adapters.export(
            folder,
            arguments.out,
            step=arguments.step,
            overrides=overrides,
            allow_worse=arguments.allow_worse,
        )
    from dmljax.bundle import exporting

    return exporting.export(
        folder,
        arguments.out,
        step=arguments.step,
        onnx=arguments.onnx,
        license=arguments.license,
        overrides=overrides,
        allow_worse=arguments.allow_worse,
        batch_sizes=arguments.batch_sizes or exporting.BATCH_SIZES,
    )


def run(arguments: argparse.Namespace, extras: Sequence[str]) -> int:
    if not arguments.out:
        raise ValueError("export needs --out, the folder to write, such as photos.bundle")
    bundle = (_export_backbone if arguments.net else _export_run)(arguments, extras)
    size = sum(path.stat().st_size for path in bundle.iterdir())
    if arguments.adapter:
        print(f"{bundle}: {size / 1e6:.1f} MB; the adapters of the backbone, without the head")
        return 0
    print(
        f"{bundle}: {size / 1e6:.1f} MB; every program gives the embeddings of the "
        f"{'net' if arguments.net else 'checkpoint'} "
        "(README.md)"
    )
    from dmljax.bundle import files

    for name, entry in files.read_manifest(bundle).thresholds.items():
        if (rate := entry.test.fmr) is not None:
            where = "the test split" if entry.chosen_on == "val" else "other test classes"
            measured = f"a false match rate of {rate:.2g} on {where}"
            print(f"threshold {name}: cosine {entry.cosine:.4f}, {measured}")
    return 0
