"""Checks plain values against types: one check for configs and for every file with a schema."""

import collections.abc
import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable
from typing import Any

from dmljax.hints import hint

_LISTS = (list, tuple, collections.abc.Sequence)
_WORDS: dict[Any, str] = {
    **{bool: "True or False", int: "a whole number", float: "a number", str: "a string"},
    **{types.NoneType: "None", collections.abc.Callable: "a function"},
    **dict.fromkeys(_LISTS, "a list"),
    **dict.fromkeys((dict, collections.abc.Mapping), "an object"),
}


class Limit(typing.NamedTuple):
    """A condition of a value, for `Annotated[int, Limit(is_even_fn, "an even number")]`."""

    holds_fn: Callable[[Any], bool]
    text: str


def between(low: float, high: float) -> Limit:
    """Returns the limit of numbers from `low` to `high`, both included."""
    return Limit(lambda value: low <= value <= high, f"a number from {low} to {high}")


def at_least(low: float) -> Limit:
    """Returns the limit of numbers from `low` on."""
    return Limit(lambda value: value >= low, f"at least {low}")


class Misfit(ValueError):
    """A value that its type does not allow; `name` is its path."""

    def __init__(self, name: str, text: str):
        super().__init__(text)
        self.name = name


def parse(kind: Any, value: Any, name: str = "") -> Any:
    """Returns a JSON value as the type `kind`; raises ValueError naming the first wrong field.

    `kind` is a dataclass, a NamedTuple, a type of JSON, `Literal`, `Annotated[T, Limit(...)]`, a
    container or a union of such types, or a class with `from_json(value, name)`. Of several
    dataclasses, the field `name` of the value selects one. Any other type takes its instances.

    >>> parse(tuple[int, ...], [1, "2"], "sizes")
    Traceback (most recent call last):
    dmljax.files.schema.Misfit: sizes[1] must be a whole number, got '2'
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    plain = origin or kind
    if origin is typing.Annotated:
        parsed = parse(arguments[0], value, name)
        if all(limit.holds_fn(parsed) for limit in arguments[1:]):
            return parsed
    elif origin in (types.UnionType, typing.Union):
        return _one_of(kind, value, name)
    elif origin is typing.Literal:
        if value in arguments:
            return value
    elif hasattr(kind, "from_json"):
        return kind.from_json(value, name)
    elif dataclasses.is_dataclass(kind) or hasattr(kind, "_fields"):
        return _object(kind, parse(dict[str, Any], value, name), name)
    elif plain in _LISTS:
        if isinstance(value, list | tuple):
            return _list(plain, arguments, value, name)
    elif plain in (dict, collections.abc.Mapping):
        if isinstance(value, dict):
            of_key, of_item = arguments or (Any, Any)
            keys = [parse(of_key, key, f"a name in {name}") for key in value]
            items = zip(keys, value.items(), strict=True)
            return {key: parse(of_item, item, f"{name}.{text}") for key, (text, item) in items}
    elif plain is collections.abc.Callable:
        if callable(value):
            return value
    elif (
        kind is Any
        or not isinstance(kind, type)
        or (
            isinstance(value, bool) == (kind is bool)
            and isinstance(value, (int, float) if kind is float else kind)
        )
    ):
        return value
    raise _wrong(name, words(kind), value)


def words(kind: Any) -> str:
    """Returns a type in words; "" for one that no plain value has, such as an array.

    >>> words(int | None), words(typing.Literal["a", "b"])
    ('a whole number or None', "'a' or 'b'")
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return " and ".join(limit.text for limit in arguments[1:])
    if origin is typing.Literal:
        return " or ".join(map(repr, arguments))
    if origin in (types.UnionType, typing.Union):
        return " or ".join(dict.fromkeys(filter(None, map(words, arguments))))
    if dataclasses.is_dataclass(kind):
        return "an object"
    return _WORDS.get(origin or kind, getattr(kind, "words", ""))


def _one_of(union: Any, value: Any, name: str) -> Any:
    """Returns the value as the first of several types that it fits."""
    kinds = typing.get_args(union)
    settings: list[Any] = [kind for kind in kinds if dataclasses.is_dataclass(kind)]
    if isinstance(value, dict) and len(settings) > 1:
        names = {x: kind for kind in settings for x in typing.get_args(_hints(kind)["name"])}
        kinds = (names[parse(typing.Literal[*names], value.get("name"), f"{name}.name")],)
    misfits = []
    for kind in kinds:
        try:
            return parse(kind, value, name)
        except Misfit as misfit:
            misfits.append(misfit)
    inner = [misfit for misfit in misfits if misfit.name != name]
    raise inner[0] if inner else _wrong(name, words(union), value)


def _list(plain: Any, kinds: tuple[Any, ...], value: Any, name: str) -> Any:
    if plain is tuple and kinds and kinds[-1] is not ...:
        if len(value) != len(kinds):
            raise _wrong(name, f"a list of {len(kinds)} values", value)
    else:
        kinds = (kinds[0] if kinds else Any,) * len(value)
    items = zip(kinds, value, strict=True)
    return tuple(parse(kind, item, f"{name}[{i}]") for i, (kind, item) in enumerate(items))


def _object(kind: Any, value: dict[str, Any], name: str) -> Any:
    prefix, fields = name and f"{name}.", inspect.signature(kind).parameters
    required = [x.name for x in fields.values() if x.default is x.empty]
    for unknown in sorted(set(value) - set(fields)):
        title = name or getattr(kind, "title_in_errors", "the object")
        near = hint(unknown[:60], fields)
        raise Misfit(f"{prefix}{unknown}", f"{title} has no field {unknown[:60]!r}{near}")
    for absent in sorted(set(required) - set(value)):
        raise Misfit(f"{prefix}{absent}", f"{prefix}{absent} is missing")
    hints = _hints(kind)
    return kind(**{n: parse(hints[n], item, f"{prefix}{n}") for n, item in value.items()})


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def _wrong(name: str, expected: str, value: Any) -> Misfit:
    expected = expected or "left out"
    return Misfit(name, f"{name or 'the value'} must be {expected}, got {value!r:.80}")
