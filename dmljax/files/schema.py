"""Reads plain JSON values into dataclasses: one check for every file that has a schema."""

import collections.abc
import dataclasses
import inspect
import types
import typing
from collections.abc import Callable
from typing import Any


class Limit(typing.NamedTuple):
    """A condition of a value, for `Annotated[int, Limit(is_even_fn, "an even number")]`."""

    holds_fn: Callable[[Any], bool]
    text: str


def between(low: float, high: float) -> Limit:
    """Returns the limit of numbers from `low` to `high`, both included."""
    return Limit(lambda value: low <= value <= high, f"a number from {low} to {high}")


def parse(kind: Any, value: Any, name: str = "") -> Any:
    """Returns a JSON value as the type `kind`; raises ValueError naming the first wrong field.

    `kind` is a dataclass, a NamedTuple, `tuple[T, ...]`, `Sequence[T]`, `dict[str, T]`, `T | None`,
    `Annotated[T, Limit(...)]`, `Any`, or a type of JSON. Fields of a class that have no default
    must be present, and no other fields may be.

    >>> parse(tuple[int, ...], [1, "2"], "sizes")
    Traceback (most recent call last):
    ValueError: sizes[1] must be int, got '2'
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin is typing.Annotated:
        parsed = parse(arguments[0], value, name)
        for limit in arguments[1:]:
            if not limit.holds_fn(parsed):
                raise _wrong(name, limit.text, value)
        return parsed
    if origin in (types.UnionType, typing.Union):
        (inner,) = (argument for argument in arguments if argument is not types.NoneType)
        return None if value is None else parse(inner, value, name)
    if dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"):
        return _object(kind, parse(dict[str, Any], value, name), name)
    plain = tuple if origin is collections.abc.Sequence else origin or kind
    if plain is tuple and isinstance(value, list):
        return tuple(parse(arguments[0], item, f"{name}[{i}]") for i, item in enumerate(value))
    if origin is dict and isinstance(value, dict):
        keys = [parse(arguments[0], key, f"a name in {name}") for key in value]
        items = zip(keys, value.items(), strict=True)
        return {key: parse(arguments[1], item, f"{name}.{text}") for key, (text, item) in items}
    allowed = (int, float) if plain is float else plain
    if not isinstance(value, allowed) or (isinstance(value, bool) and plain is not bool):
        expected = {dict: "an object", tuple: "a list"}.get(plain, plain.__name__)
        raise _wrong(name, expected, value)
    return value


def _object(kind: Any, value: dict[str, Any], name: str) -> Any:
    prefix, fields = name and f"{name}.", inspect.signature(kind).parameters
    required = [x.name for x in fields.values() if x.default is x.empty]
    if absent := sorted(set(required) - set(value)):
        raise ValueError(f"{prefix}{absent[0]} is missing")
    if unknown := sorted(set(value) - set(fields)):
        raise ValueError(f"{prefix}{unknown[0][:60]} is not a known field")
    hints = typing.get_type_hints(kind, include_extras=True)
    return kind(**{n: parse(hints[n], item, f"{prefix}{n}") for n, item in value.items()})


def _wrong(name: str, expected: str, value: Any) -> ValueError:
    return ValueError(f"{name or 'the value'} must be {expected}, got {value!r:.80}")
