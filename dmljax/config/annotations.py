"""Checks of the values of a config against the annotations of functions and options."""

import builtins
import numbers
import sys
import types
import typing
from collections import abc
from collections.abc import Callable, Mapping
from typing import Any

# Types of plain values, and their words in messages.
_PLAIN = {
    bool: (bool, "True or False"),
    int: (numbers.Integral, "a whole number"),
    float: (numbers.Real, "a number"),
    str: (str, "a name"),
    type(None): (type(None), "None"),
    None: (type(None), "None"),
}


def check(
    name: str,
    values: Mapping[str, Any],
    annotations: Mapping[str, Any],
    *,
    names: Mapping[str, Any] | None = None,
) -> None:
    """Raises TypeError if a value of a config contradicts its annotation; messages call it `name`.

    Annotations are types, or text that is evaluated with `names`, the names of `typing` and of
    Python. A list may stand for a tuple, and a whole number for a float. A value without an
    annotation passes; an annotation that cannot be judged raises ValueError.
    """
    for key, value in values.items():
        annotation = annotations.get(key, Any)
        try:
            if isinstance(annotation, str):
                annotation = eval(annotation, {**vars(typing), **(names or {})})
            fits, words = _judge(value, annotation)
        except Exception as error:
            raise ValueError(
                f"{name}: {key} cannot be checked, because its annotation {annotation} is not "
                f"understood ({error}): write another one, or leave it out"
            ) from error
        if not fits:
            raise TypeError(f"{name}: {key} must be {words or 'left out'}, not {value!r}")


def _judge(value: Any, annotation: Any) -> tuple[bool, str]:
    """Tells whether a value fits a type, and returns the type in words."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return True, "anything"
    if annotation in _PLAIN:
        type_, words = _PLAIN[annotation]
        return isinstance(value, type_) and isinstance(value, bool) == (type_ is bool), words
    if origin in (typing.Union, types.UnionType):
        judged = dict.fromkeys(_judge(value, argument) for argument in arguments)
        return any(fits for fits, _ in judged), " or ".join(words for _, words in judged if words)
    if origin is typing.Literal:
        return value in arguments, " or ".join(map(repr, arguments))
    kind = origin or annotation
    if kind in (tuple, list, abc.Sequence):
        return _judge_list(value, kind, arguments)
    if kind in (dict, abc.Mapping):
        items = value.values() if isinstance(value, dict) and arguments else ()
        return isinstance(value, dict) and all(_judge(i, arguments[1])[0] for i in items), "a dict"
    if kind is abc.Callable:
        return callable(value), "a function"
    if not isinstance(annotation, type):
        raise TypeError("a config cannot hold this type")
    return isinstance(value, annotation), ""  # such as an array, which no config can hold


def _judge_list(value: Any, kind: type, arguments: tuple[Any, ...]) -> tuple[bool, str]:
    """Judges `tuple[int, ...]`, `tuple[float, float]`, `list[str]` and `Sequence[str]`."""
    words = "a list"
    if not arguments:
        return isinstance(value, list | tuple), words
    items = list(value) if isinstance(value, list | tuple) else [None]
    is_fixed = kind is tuple and arguments[-1] is not ...
    item_types = arguments if is_fixed else arguments[:1] * len(items)
    judged = [_judge(item, type_) for item, type_ in zip(items, item_types, strict=False)]
    if judged:
        count = f"{len(arguments)} items, " if is_fixed else ""
        words += f" ({count}each {judged[0][1]})"
    fits = isinstance(value, list | tuple) and all(fits for fits, _ in judged)
    return fits and len(items) == len(item_types), words


def namespace(function: Callable | None) -> dict[str, Any]:
    """Returns the names that the annotations of a function, a class or a partial may use."""
    names: dict[str, Any] = {}
    while function is not None:
        for owner in reversed(getattr(function, "__mro__", (function,))):
            module = sys.modules.get(getattr(owner, "__module__", ""), builtins)
            names |= getattr(owner, "__globals__", vars(module))
        function = getattr(function, "__wrapped__", None) or getattr(function, "func", None)
    return names
