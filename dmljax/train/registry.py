"""Names in configs become functions."""

from __future__ import annotations

import functools
import importlib
import inspect
import numbers
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

from dmljax.hints import hint

__all__ = ["check", "resolve"]

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
