"""Write a bundle: program, parameters, preprocessing and model card in one folder.

    dmljax export runs/photos --out=photos.bundle
    dmljax export runs/photos --out=photos.bundle --onnx --batch-sizes=1,8,32
    dmljax export --net=dinov2_s14 --weights=model.safetensors --out=dino.bundle
    dmljax export runs/photos --adapter --out=adapter

The command loads the written programs and runs them on up to 256 test images. If one of them
differs from the checkpoint, the exit status is 2 and no bundle is written. The same holds for a run
from pretrained weights that scores below its backbone without training, on held-out classes or else
on the test split, unless --allow-worse is given. In Python:
dmljax.bundle.load("photos.bundle").embed(["a.jpg"]). docs/ship.md describes the files.

--net exports a published backbone (`dmljax weights`) without training. Without --weights, the
command uses the downloaded or installed file. A file of CLIP or SigLIP 2 with its text tower makes
a bundle that also embeds text, if --vocabulary names its tokenizer.json, or the file lies next to
the weights (`dmljax weights --fetch` downloads it as NAME.tokenizer.json). It needs dmljax[text]:
dmljax search BUNDLE --index=... --text="red shoe".

--adapter writes only the adapters of a run with trained=lora, as a folder for the package peft.
"""

import argparse
import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from dmljax.commands import evaluate
from dmljax.commands.parser import (
    add_fields,
    batch_sizes,
    changed,
    flag,
    given,
    leave_out,
    refuse,
    values_of,
)


@dataclasses.dataclass(frozen=True)
class BackboneFlags:
    """Flags that name a published backbone instead of a run or a bundle."""

    net: str | None = flag(None, "published backbone without training, such as dinov2_s14")
    weights: str | None = flag(None, "file with the weights of --net")


@dataclasses.dataclass(frozen=True)
class RunFlags:
    """Flags of the export of a run."""

    allow_worse: bool = flag(False, "export even if the run scores below its frozen backbone")
    adapter: bool = flag(False, "write only the LoRA adapter, for peft")


@dataclasses.dataclass(frozen=True)
class ProgramFlags:
    """Flags of the written program and its card."""

    onnx: bool = flag(False, "also write the program as ONNX")
    license: str | None = flag(None, "license to name in the model card")
    batch_sizes: tuple[int, ...] | None = flag(
        None, "batch sizes to compile, such as 1,8,32", type=batch_sizes, metavar="SIZES"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    evaluate.add_run(parser)
    parser.add_argument("--out", help="folder to write, such as photos.bundle")
    parser.add_argument("--vocabulary", help="with --net: its tokenizer.json, to embed text")
    for kind in (BackboneFlags, RunFlags, ProgramFlags):
        add_fields(parser, kind)


def _export_backbone(
    arguments: argparse.Namespace, extras: Sequence[str], program: dict[str, Any]
) -> pathlib.Path:
    refuse("export", extras)
    flags = changed(arguments, RunFlags, evaluate.StepFlags)
    leave_out(["the run"] * bool(arguments.run) + flags, "--net exports a backbone without a run")
    from dmljax.bundle import backbones

    names = (arguments.net, arguments.weights, arguments.out)
    return backbones.export(*names, vocabulary=arguments.vocabulary, **program)


def _export_run(
    arguments: argparse.Namespace, extras: Sequence[str], program: dict[str, Any]
) -> pathlib.Path:
    leave_out(given(arguments, "weights", "vocabulary"), "a run has its own weights, unlike --net")
    folder, options = evaluate.run_of("export", arguments, extras)
    options["allow_worse"] = arguments.allow_worse
    if not arguments.adapter:
        from dmljax.bundle import exporting

        return exporting.export(folder, arguments.out, **options, **program)
    leave_out(changed(arguments, ProgramFlags), "--adapter writes no program and no card")
    from dmljax.runs import export as run_export

    return run_export.adapter(folder, arguments.out, **options)


def run(arguments: argparse.Namespace, extras: Sequence[str]) -> int:
    if not arguments.out:
        raise ValueError("export needs --out, the folder to write, such as photos.bundle")
    program = {name: x for name, x in values_of(arguments, ProgramFlags).items() if x}
    export_fn = _export_backbone if arguments.net else _export_run
    bundle = export_fn(arguments, extras, program)
    size = f"{sum(path.stat().st_size for path in bundle.iterdir()) / 1e6:.1f} MB"
    if arguments.adapter:
        print(f"{bundle}: {size}; the adapters of the backbone, without the head")
        return 0
    source = "net" if arguments.net else "checkpoint"
    print(f"{bundle}: {size}; every program gives the embeddings of the {source} (README.md)")
    from dmljax.bundle import files

    for name, entry in files.read_manifest(bundle).thresholds.items():
        if (rate := entry.test.fmr) is not None:
            where = "the test split" if entry.chosen_on == "val" else "other test classes"
            measured = f"a false match rate of {rate:.2g} on {where}"
            print(f"threshold {name}: cosine {entry.cosine:.4f}, {measured}")
    return 0
