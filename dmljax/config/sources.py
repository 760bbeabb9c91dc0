"""Every value of a config and where it comes from, for `--print`. Imports no jax."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from dmljax.config import fields, files
from dmljax.train.options import Options, fields_of

_MISSING = object()


class Value(NamedTuple):
    """The value of a field such as 'optimizer.groups.0.factor'.

    `source` is the last of 'default', 'recipe', 'config file' and 'command line' that changed it,
    and in parentheses the arguments by which it changed what the recipe returns.
    """

    field: str
    value: Any
    source: str


def values_of(name: str, overrides: Sequence[str] = ()) -> list[Value]:
    """Returns the values of the completed config that `--config=name` and its overrides give."""
    path, _, argument = name.partition(":")
    get_config = files.get_config_of(path)
    layers = [("config file", files.read(path))]
    if (recipe := getattr(get_config, "recipe", None)) is not None:
        fixed = getattr(get_config, "fixed", {})
        chosen = ", ".join(f"{key}={value}" for key, value in fixed.items())
        layers = [("recipe", recipe()), (f"config file ({chosen})", get_config())]
    layers.append((f"command line ({argument})", files.read(name)))
    leaves = [(source, dict(_leaves(files.plain(config)))) for source, config in layers]
    flags = [flag.partition("=")[0].removeprefix("--config.") for flag in overrides]

    def source_of(field: str) -> str:
        if any(f"{field}.".startswith(f"{flag}.") for flag in flags):
            return "command line"
        last, previous = "default", _MISSING
        for source, values in leaves:
            if (value := _value(values, field)) is _MISSING:
                last = "default"
            elif value != previous:
                last = source
            previous = value
        if last == "default" and field in ("transform.size", "eval_transform.size"):
            return source_of("size")  # `fields.complete` has filled it in
        return last

    completed = _leaves(fields.complete(files.read(name, overrides)))
    return [Value(field, value, source_of(field)) for field, value in completed]


def _value(values: dict[str, Any], field: str) -> Any:
    """Returns the value of a field, or of a setting such as `held_out=0.2` that it belongs to."""
    while field and field not in values:
        field = field.rpartition(".")[0]
    return values.get(field, _MISSING)


def _leaves(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields `(field, value)` for all values of a config; the name of a loss is 'loss.name'."""
    types = {name: str(field.type) for name, field in fields_of(Options).items()}
    for name, value in config.items():
        if types.get(name, "").startswith("Spec") and value is not None:
            value = fields.named(value)
            value = {"name": value.get("name"), **value}  # the name first
        yield from _nested(name, value)


def _nested(field: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        yield field, value
        return
    for name, item in value.items():
        yield from _nested(f"{field}.{name}", item)


def table(name: str, overrides: Sequence[str] = ()) -> str:
    """Returns the values as aligned lines of field, value and source."""
    rows = [(field, repr(value), source) for field, value, source in values_of(name, overrides)]
    widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
    field_width, value_width = widths[0], min(widths[1], 48)
    return "\n".join(f"{f:{field_width}}  {v:{value_width}}  {source}" for f, v, source in rows)
