"""JSON values become dataclasses, or one line that names the first wrong field."""

import dataclasses
from typing import Annotated, Any

import pytest

from dmljax.files import schema


@dataclasses.dataclass(frozen=True)
class Inner:
    rate: Annotated[float, schema.between(0, 1)]
    note: str | None = None


@dataclasses.dataclass(frozen=True)
class Outer:
    name: str
    sizes: tuple[int, ...]
    inner: Inner
    others: dict[str, Inner] = dataclasses.field(default_factory=dict)
    rest: Any = None


GOOD = {"name": "a", "sizes": [1, 2], "inner": {"rate": 1}, "others": {"b": {"rate": 0.5}}}


def test_a_value_that_fits():
    parsed = schema.parse(Outer, GOOD | {"rest": [{"x": 1}]})
    assert parsed == Outer("a", (1, 2), Inner(1), {"b": Inner(0.5)}, [{"x": 1}])
    assert schema.parse(Outer, {k: GOOD[k] for k in ("name", "sizes", "inner")}).others == {}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": None}, "name must be a string, got None"),
        ({"sizes": [1, True]}, r"sizes\[1\] must be a whole number, got True"),
        ({"sizes": {}}, "sizes must be a list"),
        ({"inner": []}, r"inner must be an object, got \[\]"),
        ({"inner": {}}, "inner.rate is missing"),
        ({"inner": {"rate": 2}}, "inner.rate must be a number from 0 to 1, got 2"),
        ({"inner": {"rate": False}}, "inner.rate must be a number, got False"),
        ({"inner": {"rate": 1, "note": 3}}, "inner.note must be a string or None, got 3"),
        ({"others": {"b": {"rate": "x" * 99}}}, "others.b.rate must be a number, got 'xxxxx"),
        ({"other": 1}, "the object has no field 'other': did you mean 'others'"),
    ],
)
def test_a_value_that_does_not_fit(fields, message):
    with pytest.raises(ValueError, match=f"^{message}") as raised:
        schema.parse(Outer, GOOD | fields)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 150
