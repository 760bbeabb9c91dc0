"""List the names that a config can use: recipes, data sets, losses, nets and so on.

    dmljax list
    dmljax list losses
    dmljax list fields     the fields of a config, with their defaults and meanings

Names of your own are written as my_package.my_module:my_function.
"""

import argparse
import functools
import inspect
import pathlib
from collections.abc import Callable, Sequence

from dmljax.commands.parser import refuse
from dmljax.config import registry
from dmljax.hints import check_known

_LISTED = {registry.plural(kind): kind for kind in (*registry.KINDS, *registry.ARGUMENTS)}
KINDS = ("configs", "recipes", "fields", *_LISTED)


def configs() -> str:
    """Returns the recipes and the files in configs/, with the first lines of their docstrings."""
    from dmljax import recipes

    lines = [f"  {name:18s} {_first_line(getattr(recipes, name))}" for name in recipes.NAMES]
    text = "recipes, such as --config=glyphs:\n" + "\n".join(lines)
    if files := sorted(pathlib.Path("configs").glob("*.py")):
        width = max(len(str(file)) for file in files)
        texts = (file.read_text().partition("\n")[0].strip('"') for file in files)
        lines = [f"  {file!s:{width}s} {x}" for file, x in zip(files, texts, strict=True)]
        text += "\n\nconfig files, such as --config=configs/glyphs.py:\n" + "\n".join(lines)
    return text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", nargs="?", default="configs", help=", ".join(KINDS))


def run(arguments: argparse.Namespace, extras: Sequence[str]) -> int:
    refuse("list", extras)
    check_known("there is no kind", [arguments.kind], KINDS)
    if arguments.kind in ("configs", "recipes"):
        print(configs())
        return 0
    if arguments.kind == "fields":
        from dmljax.train.options import rows

        for name, default, meaning in rows():
            print(f"  {name:22s}  {meaning}; {default}")
        return 0
    functions = dict(sorted(registry.table(_LISTED[arguments.kind]).items()))
    width = max(map(len, functions))
    for name, function in functions.items():
        print(f"  {name:{width}s}  {_first_line(function)}".rstrip())
    return 0


def _first_line(function: Callable) -> str:
    """Returns the first line of the docstring of a function or a `functools.partial`."""
    while isinstance(function, functools.partial):
        function = function.func
    return (inspect.getdoc(function) or "").partition("\n")[0]
