"""`where=`: conditions on metadata and their operators, the same for every store.

    {"color": "red"}                     the field equals a value (text, number, bool or None)
    {"color": ["red", "blue"]}           the field equals one of several values
    {"year": {">=": 1990, "<": 2000}}    the field is a number (or text) in a range
    {"year": {">=": [1990, "1990"]}}     a range with one bound for numbers and one for text

All conditions must hold. Values compare as JSON does: 1 equals 1.0, but neither `true` nor "1".
Text is ordered by the code points of its characters. None matches a field that is null or absent.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dmljax.files import reading
from dmljax.index import inputs
from dmljax.index.errors import InvalidInput

OPERATORS = ("<", "<=", ">", ">=")
_MOST_VALUES = 1000  # distinct ones, of one field
_MOST_TOGETHER = 10_000  # of all fields: SQLite takes 32,766 parameters of a statement
_MOST_CONDITIONS = 100  # a statement nests as deep as there are conditions: SQLite's limit is 1,000


class Condition(NamedTuple):
    """`field` has an `operator` relation to one of `values`; the operator is "=" or a range's."""

    field: str
    operator: str
    values: tuple[Any, ...]


def kind(value: Any) -> str:
    """Returns the kind of a JSON value that can be compared: null, bool, number or text."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "bool"
    return "text" if isinstance(value, str) else "number"


def parse(where: Any) -> list[Condition]:
    """Returns the conditions of a filter; an empty list if it is None."""
    if where is None:
        return []
    if not isinstance(where, Mapping):
        raise InvalidInput(
            f"where={inputs.shorten(where)} is not an object of fields, such as "
            '{"folder": "cats"}'
        )
    conditions = []
    for field, wanted in where.items():
        is_name = isinstance(field, str) and field and inputs.is_text(field)
        if not is_name or '"' in field:
            raise InvalidInput(f"where: no filter can name the field {inputs.shorten(field)}")
        relations = wanted if isinstance(wanted, Mapping) else {"=": wanted}
        if not relations:
            raise InvalidInput(f"where: the range of {field!r} is empty")
        conditions += [_condition(field, *relation) for relation in relations.items()]
    total = sum(len(condition.values) for condition in conditions)
    if len(conditions) > _MOST_CONDITIONS or total > _MOST_TOGETHER:
        raise InvalidInput(
            f"where has {len(conditions)} conditions and {total} values in all; "
            f"{_MOST_CONDITIONS} and {_MOST_TOGETHER} are the limits"
        )
    return conditions


def _condition(field: str, operator: Any, wanted: Any) -> Condition:
    values = wanted if isinstance(wanted, list | tuple | set | frozenset) else [wanted]
    for value in values:
        if problem := _problem(value):
            raise InvalidInput(f"where: {field!r} is compared with {problem}")
    if operator != "=":
        if operator not in OPERATORS:
            raise InvalidInput(
                f"where: {field!r} has the operator {inputs.shorten(operator)}. Ranges have: "
                f"{', '.join(OPERATORS)}"
            )
        kinds = [kind(value) for value in values]
        if not set(kinds) <= {"number", "text"} or len(set(kinds)) < len(kinds):
            raise InvalidInput(
                f"where: {field!r} {operator} {inputs.shorten(wanted)} is not a number or a text"
            )
    # A dict compares as JSON does: 1 equals 1.0, and the kind keeps `true` apart.
    distinct = {(kind(value), value): value for value in values}
    if not 1 <= len(distinct) <= _MOST_VALUES:
        raise InvalidInput(f"where: {field!r} has {len(distinct)} values: give 1 to {_MOST_VALUES}")
    return Condition(field, operator, tuple(distinct.values()))


def _problem(value: Any) -> str | None:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, int) and not inputs.is_integer_of_64_bits(value):
        return "an integer beyond 64 bits"
    if isinstance(value, str) and not inputs.is_text(value):
        return "text that no item can have"
    if value is not None and not isinstance(value, str | int | float):
        return f"a {type(value).__name__}; possible are text, numbers, bools and None"
    return None


def from_words(words: Sequence[str]) -> dict[str, Any] | None:
    """Returns the filter of words such as `color=red`, `year>=1990`; None without words.

    A word is untyped: `x=1` matches the number or the text, and so does a bound.
    """
    where: dict[str, dict[str, list[Any]]] = {}
    for word in words:
        match = re.fullmatch(r"([^<>=]+)(<=|>=|<|>|=)(.*)", word, re.DOTALL)
        if match is None or match[1].endswith("!"):
            raise ValueError(f"--where={word!r} is not FIELD=VALUE, nor with < <= > >=")
        field, operator, text = match.groups()
        relations = where.setdefault(field, {})
        value = _value(text)
        values = [value] if isinstance(value, str | list | dict) else [value, text]
        relations[operator] = [*(relations.get("=", []) if operator == "=" else []), *values]
        if "=" in relations and len(relations) > 1:
            raise ValueError(f"--where: {field!r} has both a value and a range: give one of them")
    return {field: x.get("=", x) for field, x in where.items()} or None


def _value(text: str) -> Any:
    """Returns the JSON value of a word; its text if it has none that metadata could have."""
    try:
        value = reading.json_value(text)
    except ValueError:
        return text
    return value if isinstance(value, list | dict) or not _problem(value) else text
