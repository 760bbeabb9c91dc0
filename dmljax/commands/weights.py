"""Download, check and convert published weights.

    dmljax weights list                                name, size, input, license, data
    dmljax weights explain dinov2_s14                  the same, input, address, hash
    dmljax weights --fetch=resnet50                    download one, check it, print its path
    dmljax weights resnet50-19c8e357.pth --net=resnet50 --to=resnet50.safetensors
    dmljax weights model.safetensors --net=dinov2_s14 --adapter=FOLDER --to=merged.safetensors

--net.ARGUMENT=VALUE is an argument of the net; --net.classes=None leaves the classifier out. A
converted file contains its source, its license and the input that the weights expect. --adapter
merges a LoRA adapter of the package peft into the weights. Downloads go to $DMLJAX_CACHE, by
default ~/.cache/dmljax. docs/weights.md describes the files.
"""

import argparse
import os
import shutil
from collections.abc import Sequence
from typing import Any

from dmljax.commands.parser import given, leave_out, refuse
from dmljax.config import files as config_files

_PIPED = 1000  # columns if the output is not a terminal: nothing is cut


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", help="file to convert, or: list, explain")
    parser.add_argument("name", nargs="?", help="published file or net to explain")
    parser.add_argument("--net", help="net that the file is for, such as resnet50")
    parser.add_argument("--to", help="file to write, *.safetensors")
    parser.add_argument("--adapter", help="folder of a peft adapter to merge into the weights")
    parser.add_argument("--fetch", help="name of a published file to download")


def run(arguments: argparse.Namespace, extras: Sequence[str]) -> int:
    refuse("weights", [w for w in extras if not w.startswith("--net.") or "=" not in w])
    from dmljax import at_hand, weights
    from dmljax.weights import published

    file, name, to, fetched = arguments.file, arguments.name, arguments.to, arguments.fetch
    is_explained = file == "explain"
    if is_explained and not name:
        raise ValueError("name a published file or net to explain, such as dinov2_s14")
    if name and not fetched and not is_explained:
        raise ValueError(f"{file} {name} is not known: see dmljax weights --help")
    if fetched or is_explained or file in (None, "list"):
        words = [*given(arguments, "net", "to", "adapter"), *extras]
        words += [word for word in (file, name) if word and fetched]
        leave_out(words, "flags of a net are for a file to convert")
        columns = shutil.get_terminal_size((_PIPED, 24)).columns
        hint = "input: side in pixels; more: dmljax weights explain NAME"
        if fetched:
            print(weights.fetch(fetched, folder=at_hand.cache_folder()))
        else:
            table = f"{published.table(columns)}\n{hint}"
            print(published.explain(name) if is_explained else table)
        return 0
    if not arguments.net or not to:
        raise ValueError("--net=NAME and --to=FILE.safetensors are needed (dmljax weights --help)")
    if os.path.lexists(to):
        raise FileExistsError(f"{to} exists: choose another --to")
    words = [word.replace("--net.", "--config.net.", 1) for word in extras]
    spec = config_files.override({"net": {"name": arguments.net}}, words)["net"]
    metadata = _convert(file, spec, to, arguments.adapter)
    source = metadata["source"]["known_as"] or "unknown"
    print(*metadata["notes"], f"wrote {to}: {metadata['net']}, source {source}", sep="\n")
    return 0


def _convert(path: str, spec: dict[str, Any], to: str, adapter: str | None) -> dict[str, Any]:
    """Converts a file for the net of `spec`, by default with the classifier of the file."""
    from dmljax import weights
    from dmljax.config.registry import chosen
    from dmljax.weights import loading, readers

    chosen("net", spec)  # refuses a wrong name before a large file is read
    tensors = loading.torch_tensors(readers.read(path))
    name_map = loading.name_map_of(tensors)
    if name_map.resize and "resize" not in spec:
        spec = {**spec, "resize": name_map.resize}  # as the code behind the file does
    if "classes" not in spec and not name_map.marks:
        classes = loading.classifier_size(tensors)
        if classes is not None:
            spec = {**spec, "classes": classes}
    return weights.convert(path, chosen("net", spec).function(), to, spec=spec, adapter=adapter)
