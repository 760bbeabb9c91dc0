"""Config files and command-line overrides, as plain data. Imports no jax."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dmljax.train.registry import hint

__all__ = [
    "arguments",
    "differences",
    "duration",
    "override",
    "plain",
    "read",
]


def read(file: str, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """The config of `file`, or `file:argument`, with overrides such as `--config.steps=500`.

    A file is a Python program with `get_config()`, or `get_config(argument)`. An override may set a
    field that the file leaves to its default.
    """
    name, _, argument = str(file).partition(":")
    path = pathlib.Path(name)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} for the config {path.name!r}")
    if not path.is_file():
        beside = hint(path.name, (other.name for other in path.parent.glob("*.py")))
        raise FileNotFoundError(f"{path.parent} has no config {path.name!r}{beside}")
    spec = importlib.util.spec_from_file_location("config", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"the config {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        takes = inspect.signature(module.get_config).parameters
    except Exception as error:  # a config is the user's program
        raise ValueError(f"{path} does not run: {type(error).__name__}: {error}") from error
    if argument and not takes:
        raise ValueError(f"{path} takes no argument, so not {argument!r}")
    try:
        config = plain(module.get_config(*[argument] if argument else []))
    except Exception as error:
        raise ValueError(f"{path} does not run: {type(error).__name__}: {error}") from error
    return override(config, overrides)


def override(config: dict[str, Any], flags: Iterable[str]) -> dict[str, Any]:
    """The config, itself changed by flags such as `--config.steps=500`."""
    for flag in flags:
        key, equals, value = flag.partition("=")
        if not key.startswith("--config.") or not equals:
            raise ValueError(f"{flag} is not known; an override is --config.steps=500")
        *parents, leaf = key.removeprefix("--config.").split(".")
        place = config
        for parent in parents:
            if isinstance(place.get(parent), str):
                place[parent] = {"name": place[parent]}
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                raise ValueError(f"{flag}: {parent} has no fields, it is {place!r}")
        try:
            place[leaf] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            place[leaf] = value
    return config


def arguments(text: str | None, **defaults: Any) -> dict[str, Any]:
    """What follows a config's name, 'attention=gat,mlp=False', over `defaults`, of their types."""
    values = dict(defaults)
    for part in filter(None, (text or "").split(",")):
        name, equals, word = part.partition("=")
        if name not in defaults:
            raise ValueError(f"the config has no argument {name!r}{hint(name, defaults)}")
        kind = type(defaults[name])
        kinds = {"True": True, "False": False} if kind is bool else None
        try:
            values[name] = kinds[word] if kinds else kind(word)
        except (KeyError, ValueError):
            equals = ""
        if not equals:
            wanted = "True or False" if kinds else f"a value of type {kind.__name__}"
            raise ValueError(f"the argument {part!r} needs {wanted}: write {name}={defaults[name]}")
    return values


def plain(config: Any) -> Any:
    """A ConfigDict, or anything nested, as dicts, lists and scalars."""
    if isinstance(config, Mapping) or hasattr(config, "items"):
        return {str(k): plain(v) for k, v in config.items()}
    return [plain(v) for v in config] if isinstance(config, list | tuple) else config


def duration(length: int | str, *, per_epoch: int) -> int:
    """Steps: a number of them, or '60 epochs'."""
    if isinstance(length, str):
        number, _, unit = length.partition(" ")
        factors = {"steps": 1, "step": 1, "epochs": per_epoch, "epoch": per_epoch}
        try:
            count = float(number) * factors[unit]
        except (ValueError, KeyError):
            count = -1
        if not 0 <= count < float("inf"):
            raise ValueError(f"{length!r} is no duration: write 500, or '60 epochs'")
        return max(1, round(count))
    if isinstance(length, bool) or int(length) != length or length < 0:
        raise ValueError(f"{length!r} is no duration: write 500, or '60 epochs'")
    return int(length)


def differences(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """`(path, old, new)` of every field in which two plain configs differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(set(old) | set(new)):
            yield from differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
    elif old != new:
        yield path, old, new
