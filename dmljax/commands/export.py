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
import re
from collections.abc import Sequence
from typing import Any

from dmljax.commands import evaluate
from dmljax.commands.parser import add_fields, flag, given, leave_out, refuse, values_of


def sizes(text: str) -> tuple[int, ...]:
    """Returns the numbers of `--batch-sizes=1,8,32`."""
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of positive numbers")
    return tuple(map(int, text.split(",")))


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
        None, "batch sizes to compile, such as 1,8,32", type=sizes, metavar="SIZES"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    evaluate.add_run(parser)
    parser.add_argument("--out", help="folder to write, such as photos.bundle")
    parser.add_argument("--vocabulary", help="with --net: its tokenizer.json, to embed text")
    for kind in (BackboneFlags, RunFlags, ProgramFlags):
        add_fields(parser, kind)


def run(arguments: argparse.Namespace, extras: Sequence[str]) -> int:
    out = arguments.out
    if not out:
        raise ValueError("export needs --out, the folder to write, such as photos.bundle")
    values = values_of(arguments, ProgramFlags)
    program: dict[str, Any] = {name: x for name, x in values.items() if x}
    if arguments.net:
        refuse("export", extras)
        flags = ["the run"] * bool(arguments.run) + given(arguments, RunFlags, "step")
        leave_out(flags, "--net exports a backbone without a run")
        from dmljax.bundle import backbones

        program["vocabulary"] = arguments.vocabulary
        bundle = backbones.export(arguments.net, arguments.weights, out, **program)
        return _print_bundle(bundle, "net")
    flags = given(arguments, "weights", "vocabulary")
    leave_out(flags, "a run has its own weights, unlike --net")
    folder, options = evaluate.run_of("export", arguments, extras)
    options["allow_worse"] = arguments.allow_worse
    if not arguments.adapter:
        from dmljax.bundle import exporting

        bundle = exporting.export(folder, out, **options, **program)
        return _print_bundle(bundle, "checkpoint")
    leave_out(given(arguments, ProgramFlags), "--adapter writes no program and no card")
    from dmljax.runs import export as run_export

    adapter = run_export.adapter(folder, out, **options)
    print(f"{adapter}: {_size(adapter)}; the adapters of the backbone, without the head")
    return 0


def _size(folder: pathlib.Path) -> str:
    return f"{sum(path.stat().st_size for path in folder.iterdir()) / 1e6:.1f} MB"


def _print_bundle(bundle: pathlib.Path, source: str) -> int:
    from dmljax.bundle import files

    text = f"every program gives the embeddings of the {source} (README.md)"
    print(f"{bundle}: {_size(bundle)}; {text}")
    for name, entry in files.read_manifest(bundle).thresholds.items():
        if (rate := entry.test.fmr) is not None:
            where = "the test split" if entry.chosen_on == "val" else "other test classes"
            measured = f"a false match rate of {rate:.2g} on {where}"
            print(f"threshold {name}: cosine {entry.cosine:.4f}, {measured}")
    return 0
