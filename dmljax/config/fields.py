"""A config as plain data, checked and completed by the dataclasses of options. Imports no jax."""

import json
from typing import Any

from dmljax.config import files as config_files
from dmljax.config import registry
from dmljax.hints import hint
from dmljax.train.options import SECTIONS, Options, allowed_values, defaults_of, fields_of


def complete(config: Any) -> dict[str, Any]:
    """The config with defaults filled in, as plain data that JSON can hold.

    `size` is also filled into the two transforms, where they do not set it. Raises a one-line error
    for an unknown or missing field, a wrong type, or a value out of range.
    """
    config = config_files.plain(config)
    json.dumps(config)  # raises for what a file cannot hold
    config = _checked(config, Options, "the config")
    for name, section in SECTIONS.items():
        config[name] = _checked(config[name], section, name)
    if config["size"] is not None:
        for name in ("transform", "eval_transform"):
            config[name] = {"size": config["size"], **named(config[name])}
    return config


def typed(config: dict[str, Any]) -> Options:
    """Returns the options of a completed config, with tuples instead of lists."""
    values = _tuples(config)
    specs = [name for name, field in fields_of(Options).items() if field.type.startswith("Spec")]
    values |= {name: named(values[name]) for name in specs}
    return Options(**values | {name: type_(**values[name]) for name, type_ in SECTIONS.items()})


def with_normalization(config: dict[str, Any], normalization: Any) -> dict[str, Any]:
    """A completed config that names its normalization, for the run folder."""
    return {**config, "normalize": config["normalize"] or normalization}


def named(spec: Any) -> Any:
    """A name as `{"name": ...}`; a dict, or None, as it is."""
    return {"name": spec} if isinstance(spec, str) else spec


def short(spec: Any) -> Any:
    """`{"name": ...}` as that name; a dict with more fields, a name, or None, as it is."""
    return spec["name"] if isinstance(spec, dict) and set(spec) == {"name"} else spec


def _checked(values: Any, section: type, title: str) -> dict[str, Any]:
    """The values of a section with its defaults; raises if one of them does not fit its field."""
    fields = fields_of(section)
    if not isinstance(values, dict):
        raise TypeError(f"{title} has the fields {', '.join(fields)}, so it cannot be {values!r}")
    if unknown := sorted(set(values) - set(fields)):
        noun = "field " if section is Options else ""
        raise ValueError(f"{title} has no {noun}{unknown[0]!r}{hint(unknown[0], fields)}")
    values = config_files.plain(defaults_of(section)) | values
    if missing := [name for name in fields if name not in values]:
        meaning = fields[missing[0]].metadata["meaning"]
        raise ValueError(f"{title} sets no {', '.join(missing)} ({missing[0]}: {meaning})")
    values = {name: values[name] for name in fields}
    registry.check(title, values, {n: f.type for n, f in fields.items() if _is_plain(f)})
    for name, field in fields.items():
        value = values[name]
        if not _fits(value, field):
            path = name if section is Options else f"{title}.{name}"
            raise ValueError(f"{path} must be {allowed_values(field)}, not {value!r}")
        if field.type.startswith("Spec") and not _is_spec(value, field):
            advice = ""
            if isinstance(value, dict) and "name" not in value:
                advice = f": say what has these options, by --config.{name}.name=..."
            raise TypeError(
                f"{name} must be a name or dict(name='...', ...), not {value!r}{advice}"
            )
    return values


def _is_plain(field: Any) -> bool:
    """Whether a field has no other check, as a `Spec` has in `registry.resolve`."""
    return field.name not in SECTIONS and not field.type.startswith(("Spec", "Length"))


def _fits(value: Any, field: Any) -> bool:
    """Whether a value of the right type is one of the choices of its field, or in its range."""
    rule = field.metadata
    if value is None or isinstance(value, bool) or not rule:
        return True
    if isinstance(value, str):
        return not rule["choices"] or value in rule["choices"]
    below, least = rule["below"], rule["least"]
    return (least is None or value >= least) and (below is None or value < below)


def _is_spec(value: Any, field: Any) -> bool:
    if value is None:
        return "None" in field.type
    return isinstance(named(value), dict) and isinstance(named(value).get("name"), str)


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _tuples(v) for k, v in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value
