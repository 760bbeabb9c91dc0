"""`where=`: conditions on metadata and their operators, the same for every store.

    {"color": "red"}                     the field equals a value (text, number, bool or None)
    {"color": ["red", "blue"]}           the field equals one of several values
    {"year": {">=": 1990, "<": 2000}}    the field is a number (or text) in a range

All conditions must hold. A value that is repeated counts once. Values compare as JSON does: 1
equals 1.0, but neither `true` nor "1". Text is ordered by its characters' code points. None matches
a field that is null or absent. `conditions` in `commands/search.py` reads the flag `--where`, and
`condition_sql` of each store makes SQL.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from dmljax.files import reading
from dmljax.hints import hint
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
    """The kind of a JSON value that can be compared: null, bool, number or text."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "bool"
    return "text" if isinstance(value, str) else "number"


def parse(where: Any) -> list[Condition]:
    """The conditions of a filter; an empty list if it is None."""
    if where is None:
        return []
    if not isinstance(where, Mapping):
        raise InvalidInput(
            f"where={inputs.shorten(where)} is not an object of fields, such as "
            '{"folder": "cats"}'
        )
    conditions = []
    for field, wanted in where.items():
        is_name = isinstance(field, str) and field and inputs.is_unicode(field)
        if not is_name or "\0" in field or '"' in field:
            raise InvalidInput(
                f"where has the field {inputs.shorten(field)}, which no filter can name"
            )
        if isinstance(wanted, Mapping):
            if not wanted:
                raise InvalidInput(f"where: the range of {field!r} is empty")
            for operator, bound in wanted.items():
                if operator not in OPERATORS:
                    raise InvalidInput(
                        f"where: {field!r} has the operator {inputs.shorten(operator)}. "
                        f"Ranges have: {', '.join(OPERATORS)}"
                    )
                if kind(_scalar(field, bound)) not in ("number", "text"):
                    raise InvalidInput(f"where: {field!r} {operator} {bound!r} has no order")
                conditions.append(Condition(field, operator, (bound,)))
        else:
            values = wanted if isinstance(wanted, list | tuple | set | frozenset) else [wanted]
            if not values:
                raise InvalidInput(f"where: the list of values of {field!r} is empty")
            # A dict compares as JSON does: 1 equals 1.0, and the kind keeps `true` apart.
            distinct = {(kind(_scalar(field, v)), v): v for v in values}
            if len(distinct) > _MOST_VALUES:
                raise InvalidInput(
                    f"where: {field!r} has {len(distinct)} values; {_MOST_VALUES} are the limit"
                )
            conditions.append(Condition(field, "=", tuple(distinct.values())))
    if len(conditions) > _MOST_CONDITIONS:
        raise InvalidInput(
            f"where has {len(conditions)} conditions; {_MOST_CONDITIONS} are the limit"
        )
    if (total := sum(len(condition.values) for condition in conditions)) > _MOST_TOGETHER:
        raise InvalidInput(f"where has {total} values in all; {_MOST_TOGETHER} are the limit")
    return conditions


def _scalar(field: str, value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidInput(f"where: {field!r} is compared with {value}")
    if isinstance(value, int) and not inputs.is_integer_of_64_bits(value):
        raise InvalidInput(f"where: {field!r} is compared with an integer beyond 64 bits")
    if value is not None and not isinstance(value, str | int | float):
        raise InvalidInput(
            f"where: {field!r} is compared with a {type(value).__name__}; possible are text, "
            "numbers, bools and None, lists of them, and ranges"
        )
    if isinstance(value, str) and ("\0" in value or not inputs.is_unicode(value)):
        raise InvalidInput(f"where: {field!r} is compared with text that no item can have")
    return value


def check_fields(conditions: list[Condition], field_names: set[str]) -> None:
    """Refuses a field that no item has."""
    for condition in conditions:
        if (field := condition.field) not in field_names:
            name = inputs.shorten(field)
            raise InvalidInput(f"no item has the field {name}{hint(field, field_names)}")


def fields_of(metadata: Iterable[str]) -> set[str]:
    """The names of the fields of JSON objects."""
    names: set[str] = set()
    for text in metadata:
        names.update(reading.json_value(text))
    return names
