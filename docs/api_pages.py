"""Writes `docs/api/*.md`: every public name, its signature and its docstring as Markdown.

    python docs/api_pages.py

Sphinx's own autodoc reads docstrings as reStructuredText; dmljax writes them in Markdown.
"""

from __future__ import annotations

import importlib
import inspect
import pathlib
import re
from types import ModuleType
from typing import Any

# page -> title, modules
PAGES = {
    "losses": ("Losses", ["dmljax.losses", "dmljax.losses.pnp_penalties"]),
    "miners": ("Miners", ["dmljax.miners", "dmljax.miners.selections"]),
    "metrics": ("Metrics", ["dmljax.metrics"]),
    "retrieval": ("Retrieval and clustering", ["dmljax.retrieval"]),
    "ops": ("Distances, pair masks, reductions", ["dmljax.ops"]),
    "nets": (
        "Nets",
        ["dmljax.nets", "dmljax.nets.heads", "dmljax.nets.pools", "dmljax.nets.layers"],
    ),
    "methods": (
        "Methods",
        [
            "dmljax.methods.base",
            "dmljax.methods.assemble",
            "dmljax.methods",
            "dmljax.methods.abe",
            "dmljax.methods.dvml",
            "dmljax.methods.graph",
        ],
    ),
    "adapt": ("What learns", ["dmljax.adapt", "dmljax.adapt.trained"]),
    "weights": ("Pretrained weights", ["dmljax.weights"]),
    "data": (
        "Data",
        ["dmljax.data.datasets", "dmljax.data.transforms", "dmljax.data.sampling"],
    ),
    "recipes": ("Recipes", ["dmljax.recipes"]),
    "train": ("Runs", ["dmljax.train.loop", "dmljax.runs.folder", "dmljax.train.step"]),
}


def write(folder: pathlib.Path) -> None:
    """Writes one page for each group of modules, and an index of the pages."""
    folder.mkdir(exist_ok=True)
    for name, (title, modules) in PAGES.items():
        text = "\n\n".join(_module(importlib.import_module(module)) for module in modules)
        _replace(folder / f"{name}.md", f"# {title}\n\n{text}\n")
    entries = "\n".join(PAGES)
    contents = f"```{{toctree}}\n:maxdepth: 1\n\n{entries}\n```"
    _replace(folder / "index.md", f"# API reference\n\n{contents}\n")


def _replace(path: pathlib.Path, text: str) -> None:
    """Does not touch an unchanged page, so that Sphinx does not read it again."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def _module(module: ModuleType) -> str:
    parts = [f"## `{module.__name__}`", _markdown(inspect.getdoc(module) or "")]
    for name in getattr(module, "__all__", []):
        value = getattr(module, name)
        if callable(value) and not isinstance(value, ModuleType):
            parts.append(_entry(module.__name__, name, value))
    return "\n\n".join(parts)


def _entry(module: str, name: str, value: Any) -> str:
    kind = "class" if inspect.isclass(value) else "function"
    text = _markdown(inspect.getdoc(value) or "")
    return f"::::{{py:{kind}}} {name}{_signature(value)}\n:module: {module}\n\n{text}\n::::"


def _signature(value: Any) -> str:
    """Names and defaults; shapes and types are in the docstring or the source."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    plain = signature.replace(parameters=parameters, return_annotation=signature.empty)
    # A default that is a function or an array prints its address, which differs in every build.
    return re.sub(r"<(?:function|PjitFunction of <function) (\w+)[^>]*>+", r"\1", str(plain))


def _markdown(docstring: str) -> str:
    """The docstring with its examples in fences and its arguments as a list."""
    lines, fenced, in_arguments = [], False, False
    for line in docstring.splitlines():
        stripped = line.strip()
        if stripped.startswith(">>>") and not fenced:
            lines += ["", "```python"]
            fenced = True
        elif fenced and not stripped:
            lines.append("```")
            fenced = False
        if stripped == "Args:":
            in_arguments = True
            lines += ["**Arguments**", ""]
            continue
        if in_arguments and not line.startswith(" "):
            in_arguments = False
        argument = re.match(r" {4}(\w+): (.*)", line)
        if in_arguments and argument:
            lines.append(f"* `{argument[1]}`: {argument[2]}")
        elif in_arguments:
            lines.append(f"  {stripped}")
        else:
            lines.append(stripped if fenced else line)
    return "\n".join([*lines, *["```"] * fenced])


if __name__ == "__main__":
    write(pathlib.Path(__file__).parent / "api")
