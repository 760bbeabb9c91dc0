"""`where=`: conditions on metadata and their operators, the same for every store.

    {"color": "red"}                     the field equals a value (text, number, bool or None)
    {"color": ["red", "blue"]}           the field equals one of several values
    {"year": {">=": 1990, "<": 2000}}    the field is a number (or text) in a range
    {"year": {">=": [1990, "1990"]}}     a range with one bound for numbers and one for text

All conditions must hold. Values compare as JSON does: 1 equals 1.0, but neither `true` nor "1".
Text is ordered by the code points of its characters. None matches a field that is null or absent.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from dmljax.files import reading
from dmljax.index import inputs
from dmljax.index.inputs import InvalidInput

OPERATORS = ("<", "<=", ">", ">=")
_MOST_VALUES = 1000  # distinct ones, of one field
_MOST_TOGETHER = 10_000  # of all fields: SQLite takes 32,766 parameters of a statement
_MOST_CONDITIONS = 100  # a statement nests as deep as there are conditions: SQLite's limit is 1,000


class Condition(NamedTuple):
    """`field` has an `operator` relation to one of `values`; the operator is "=" or a range's."""

    field: str
    operator: str
    values: tuple[Any, ...]


class Dialect(NamedTuple):
    """How a database reads the column `metadata` of items; `?` stands for a parameter."""

    type: str  # SQL of the type of a field; it is null where the field is absent
    each: str  # SQL of a table of all fields, whose names are in the column `key`
    tests: Mapping[str, str]  # by the kind of values: SQL where `{}` stands for a relation to them
    ids: str  # SQL after `id`: it is one of a list
    field_fn: Callable[[str], Any]  # returns the parameter for a field
    value_fn: Callable[[Any], Any]  # returns the parameter for a value
    list_fn: Callable[[list], Any]  # returns the parameter for a list


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
    if problem := next(_problems(where), None):
        raise InvalidInput(f"where: {problem}")
    return [
        Condition(field, operator, _distinct(wanted))
        for field, relations in where.items()
        for operator, wanted in _relations(relations).items()
    ]


def _relations(wanted: Any) -> Mapping[Any, Any]:
    return wanted if isinstance(wanted, Mapping) else {"=": wanted}


def _values(wanted: Any) -> list[Any]:
    return list(wanted) if isinstance(wanted, list | tuple | set | frozenset) else [wanted]


def _distinct(wanted: Any) -> tuple[Any, ...]:
    """Returns each value once. Keys of a dict compare as JSON does: 1 equals 1.0."""
    return tuple({(kind(value), value): value for value in _values(wanted)}.values())


def _problems(where: Any) -> Iterator[str]:
    """Yields what is wrong with a filter."""
    if not isinstance(where, Mapping):
        yield f'{inputs.shorten(where)} is not an object of fields, such as {{"folder": "cats"}}'
        return
    conditions = total = 0
    for field, relations in where.items():
        if not isinstance(field, str) or not field or '"' in field or not inputs.is_text(field):
            yield f"no filter can name the field {inputs.shorten(field)}"
        if not _relations(relations):
            yield f"the range of {field!r} is empty"
        for operator, wanted in _relations(relations).items():
            yield from (f"{field!r} {problem}" for problem in _problems_of(operator, wanted))
            conditions, total = conditions + 1, total + len(_distinct(wanted))
    if conditions > _MOST_CONDITIONS or total > _MOST_TOGETHER:
        limits = f"{_MOST_CONDITIONS} and {_MOST_TOGETHER} are the limits"
        yield f"it has {conditions} conditions and {total} values in all; {limits}"


def _problems_of(operator: Any, wanted: Any) -> Iterator[str]:
    values = _values(wanted)
    for value in values:
        is_scalar = value is None or isinstance(value, str | int | float)
        problem = inputs.problem_of_value(value) if is_scalar else f"a {type(value).__name__}"
        if problem:
            yield f"is compared with {problem}"
    if operator not in ("=", *OPERATORS):
        operators = ", ".join(OPERATORS)
        yield f"has the operator {inputs.shorten(operator)}. Ranges have: {operators}"
    kinds = [kind(value) for value in values]
    if operator != "=" and (not {*kinds} <= {"number", "text"} or len({*kinds}) < len(kinds)):
        yield f"{operator} {inputs.shorten(wanted)} is not a number or a text"
    if not 1 <= (count := len(_distinct(wanted))) <= _MOST_VALUES:
        yield f"has {count} values: give 1 to {_MOST_VALUES}"


def to_sql(conditions: Sequence[Condition], dialect: Dialect) -> tuple[str, list[Any]]:
    """Returns the text after `where`, which contains no values, and its parameters."""
    tests = {"null": f"coalesce({dialect.type}, 'null') = 'null'", **dialect.tests}
    terms, parameters = ["true"], []
    for field, operator, values in conditions:
        choices = []
        for name, test in tests.items():
            if chosen := [value for value in values if kind(value) == name]:
                marks = ", ".join("?" * len(chosen))
                relation = f"in ({marks})" if operator == "=" else f"{operator} ?"
                choices.append(f"({test.format(relation)})")
                parameters += [dialect.field_fn(field)] * test.count("?")
                parameters += map(dialect.value_fn, chosen) if name != "null" else ()
        terms.append(f"({' or '.join(choices)})")
    return " and ".join(terms), parameters


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
    is_valid = isinstance(value, list | dict) or not inputs.problem_of_value(value)
    return value if is_valid else text
