"""Download, check and convert published weights.

    dmljax weights                                     list the published files
    dmljax weights --fetch=resnet50                    download one, check it, print its path
    dmljax weights resnet50-19c8e357.pth --net=resnet50 --to=resnet50.safetensors

--net.KEYWORD=VALUE is an argument of the net; --net.classes=None leaves the classifier out. A
converted file carries its source, its license and the input that the weights expect. Files are
downloaded to $DMLJAX_CACHE, or ~/.cache/dmljax. docs/weights.md describes them.
"""

from __future__ import annotations

import argparse
import ast
import os
from collections.abc import Sequence
from typing import Any

from dmljax.commands.parser import refuse

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", help="published file to convert")
    parser.add_argument("--net", help="the net that it is for, such as resnet50")
    parser.add_argument("--to", help="file to write, *.safetensors")
    parser.add_argument("--fetch", help="name of a published file to download")


def run(arguments: argparse.Namespace, extras: Sequence[str]) -> int:
    keywords = _keywords(extras)
    from dmljax import weights

    if arguments.fetch:
        folder = os.environ.get("DMLJAX_CACHE") or "~/.cache/dmljax"
        print(weights.fetch(arguments.fetch, folder=folder))
        return 0
    if arguments.file is None:
        if arguments.net or arguments.to or extras:
            raise ValueError("name a file to convert (see dmljax weights --help)")
        print(_table())
        return 0
    if not arguments.net or not arguments.to:
        raise ValueError("--net=NAME and --to=FILE.safetensors are needed (dmljax weights --help)")
    metadata = _convert(arguments.file, {"name": arguments.net, **keywords}, arguments.to)
    for note in metadata["notes"]:
        print(note)
    source = metadata["source"]["known_as"] or "unknown"
    print(f"wrote {arguments.to}: {metadata['net']}, source {source}")
    return 0


def _keywords(extras: Sequence[str]) -> dict[str, Any]:
    """The arguments of the net among the words of the command line."""
    refuse("weights", [w for w in extras if not w.startswith("--net.") or "=" not in w])
    keywords = {}
    for word in extras:
        key, _, value = word.removeprefix("--net.").partition("=")
        try:
            keywords[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            keywords[key] = value
    return keywords


def _convert(path: str, spec: dict[str, Any], to: str) -> dict[str, Any]:
    """Converts a file for the net of `spec`, which gets the file's classifier by default."""
    from dmljax import weights
    from dmljax.config import registry

    registry.resolve("net", spec)  # refuses a wrong name before a large file is read
    if "classes" not in spec:
        classes = weights.classifier_size(weights.torch_tensors(weights.read(path)))
        if classes is not None:
            spec = {**spec, "classes": classes}
    return weights.convert(path, registry.resolve("net", spec)(), to, spec=spec)


def _table() -> str:
    """The published files: name, net, size, digest, address, license."""
    from dmljax import weights

    lines = []
    for name, published in weights.PUBLISHED.items():
        algorithm, _, digits = published.digest.partition(":")
        more = "" if len(digits) >= 40 else "..."
        digest = f"{algorithm} {digits}{more}" if algorithm else "no digest"
        lines += [f"{name}  --net={published.net}  {published.megabytes} MB  {digest}"]
        lines += [f"    {published.url}", f"    {published.license}"]
    return "\n".join(lines)
