"""Names in configs become functions here. This room imports no jax."""

from __future__ import annotations

import ast
import difflib
import functools
import importlib
import importlib.util
import inspect
import numbers
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

__all__ = [
    "arguments",
    "check",
    "differences",
    "duration",
    "hint",
    "override",
    "plain",
    "read",
    "resolve",
]

_KINDS = {
    "float": (numbers.Real, "a number"),
    "int": (numbers.Integral, "a whole number"),
    "bool": (bool, "True or False"),
    "str": (str, "a name"),
    "tuple": ((list, tuple), "a list"),
}


def resolve(
    room: ModuleType, spec: str | Mapping[str, Any], *, taken: Iterable[str] = ()
) -> Callable:
    """The function that `spec` names in `room`, with the rest of `spec` bound as keywords.

    `spec` is a name or `dict(name=..., **keywords)`. The names of a room are its `__all__`; a name
    'package.module:function' is looked up outside the room. Unknown names and keywords raise;
    the hint also names `taken`, the keywords that the caller itself takes.
    """
    keywords = dict(spec) if isinstance(spec, Mapping) else {"name": spec}
    if not isinstance(name := keywords.pop("name", None), str):
        raise ValueError(f"{spec!r} names no function: write dict(name='...', ...)")
    function = _import(name) if ":" in name else _look_up(room, name)
    parameters = inspect.signature(function).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        known = [n for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY]
        for keyword in keywords:
            if keyword not in known:
                raise TypeError(
                    f"{name} has no argument {keyword!r}{hint(keyword, [*known, *taken])}"
                )
    check(name, keywords, {n: p.annotation for n, p in parameters.items()})
    return functools.partial(function, **keywords) if keywords else function


def check(name: str, values: Mapping[str, Any], annotations: Mapping[str, Any]) -> None:
    """Values must be what their annotations say, as far as those say number, name, truth or None.

    Only plain values, such as a command line has, are looked at: arrays pass.
    """
    for key, value in values.items():
        annotation = inspect.formatannotation(annotations.get(key, Any)).strip("'")
        kinds = ["tuple"] if annotation.startswith("Sequence[") else annotation.split(" | ")
        plain_ones = (bool, int, float, str, list, tuple, dict, type(None))
        if not set(kinds) <= {*_KINDS, "None"} or not isinstance(value, plain_ones):
            continue
        known = [_KINDS[kind] for kind in kinds if kind != "None"]
        fits = any(isinstance(value, kind) for kind, _ in known)
        fits = fits and ("bool" in kinds or not isinstance(value, bool))
        if not fits and not (value is None and "None" in kinds):
            words = [word for _, word in known] + ["None"] * ("None" in kinds)
            raise TypeError(f"{name}: {key} must be {' or '.join(words)}, not {value!r}")


def _look_up(room: ModuleType, name: str) -> Callable:
    if name in room.__all__:
        return getattr(room, name)
    raise ValueError(f"{room.__name__} has no {name!r}{hint(name, list(room.__all__))}")


def _import(name: str) -> Callable:
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name!r} cannot be imported: {error}") from error


def hint(word: str, known: Iterable[str]) -> str:
    """The end of a message about `word`: the nearest of what is known, and all of it."""
    known = sorted(known)
    near = difflib.get_close_matches(word, known, n=1)
    start = f": did you mean {near[0]!r}?" if near else "."
    return f"{start} It has: {', '.join(known) or 'none'}"


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
