"""Names in configs become functions here. This room imports no jax."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

__all__ = ["resolve"]


def resolve(room: ModuleType, spec: str | Mapping[str, Any]) -> Callable:
    """The function that `spec` names in `room`, with the rest of `spec` bound as keywords.

    `spec` is a name or `dict(name=..., **keywords)`. The names of a room are its `__all__`; a name
    'package.module:function' is looked up outside the room. Unknown names and keywords raise.
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
                raise TypeError(f"{name} has no argument {keyword!r}{_help(keyword, known)}")
    return functools.partial(function, **keywords) if keywords else function


def _look_up(room: ModuleType, name: str) -> Callable:
    if name in room.__all__:
        return getattr(room, name)
    raise ValueError(f"{room.__name__} has no {name!r}{_help(name, list(room.__all__))}")


def _import(name: str) -> Callable:
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name!r} cannot be imported: {error}") from error


def _help(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    hint = f": did you mean {near[0]!r}?" if near else "."
    return f"{hint} It has: {', '.join(sorted(known)) or 'none'}"
