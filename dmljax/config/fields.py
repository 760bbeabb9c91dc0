"""A config as plain data: checked, completed and hashed. Imports no jax."""

import dataclasses
import inspect
import json
import numbers
import types
import typing
from collections import abc
from collections.abc import Mapping
from typing import Any, NamedTuple

from dmljax.files.writing import json_digest
from dmljax.hints import hint
from dmljax.train.options import (
    SECTIONS,
    Options,
    Spec,
    allowed_values,
    defaults_of,
    fields_of,
    takes,
)

# Sections of a config that cannot change a result, and fields that say where files are. The content
# of those files has a digest of its own. A completed config holds `size` in both transforms, too.
_IRRELEVANT = ("runtime", "notes", "pictures", "size")
PATHS = {
    "dataset": ("root", "path", "data_dir"),
    "net": ("weights",),
}
_ELSEWHERE = {**PATHS, "start": ("name", "mixed_with")}  # the content of both has a digest
# Types of plain values, and their words in messages.
_PLAIN = {
    bool: (bool, "True or False"),
    int: (numbers.Integral, "a whole number"),
    float: (numbers.Real, "a number"),
    str: (str, "a name"),
    types.NoneType: (types.NoneType, "None"),
}


def plain(config: Any) -> Any:
    """Returns a ConfigDict, or anything nested, as dicts, lists and scalars."""
    if isinstance(config, Mapping) or hasattr(config, "items"):
        return {str(k): plain(v) for k, v in config.items()}
    return [plain(v) for v in config] if isinstance(config, list | tuple) else config


def named(spec: Any) -> Any:
    """Returns a name as `{"name": ...}`; a dict, or None, unchanged."""
    return {"name": spec} if isinstance(spec, str) else spec


def short(spec: Any) -> Any:
    """Returns `{"name": ...}` as that name; a dict with more fields, a name, or None, unchanged."""
    return spec["name"] if isinstance(spec, dict) and set(spec) == {"name"} else spec


def with_normalization(config: dict[str, Any], spec: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a completed config that names its normalization, for the run folder."""
    normalization = short({k: v for k, v in spec.items() if k != "force"})
    return {**config, "normalize": config["normalize"] or normalization}


def complete(config: Any) -> dict[str, Any]:
    """Returns the config with defaults filled in, as plain data that JSON can hold.

    `size` is also filled into the two transforms, where they do not set it. Raises a one-line error
    for an unknown or missing field, a wrong type, or a value out of range.
    """
    config = plain(config)
    json.dumps(config)  # raises for what a file cannot hold
    config = _complete(config, Options, "")
    if config["size"] is not None:
        for name in ("transform", "eval_transform"):
            config[name] = {"size": config["size"], **named(config[name])}
    return config


def _complete(values: Any, section: type, path: str) -> dict[str, Any]:
    """Returns the values of a dataclass of options with its defaults, all of them checked."""
    title, fields = path or "the config", fields_of(section)
    if not isinstance(values, dict):
        raise TypeError(f"{title} has the fields {', '.join(fields)}, so it cannot be {values!r}")
    if unknown := sorted(set(values) - set(fields)):
        raise ValueError(f"{title} has no field {unknown[0]!r}{hint(unknown[0], fields)}")
    values = plain(defaults_of(section)) | values
    if missing := [name for name in fields if name not in values]:
        meaning = fields[missing[0]].metadata["meaning"]
        raise ValueError(f"{title} does not set {', '.join(missing)} ({missing[0]}: {meaning})")
    prefix = f"{path}." if path else ""
    return {name: _value(values[name], field, prefix + name) for name, field in fields.items()}


def _value(value: Any, field: dataclasses.Field, path: str) -> Any:
    """Returns a checked value; a section and a setting with all of their fields."""
    rule = field.metadata
    if field.name in SECTIONS:
        return _complete(value, SECTIONS[field.name], path)
    if settings := rule.get("settings"):
        if path == "held_out" and isinstance(value, int | float) and not isinstance(value, bool):
            value = {"name": "last", "fraction": value} if value else None
        if value in (None, False) and takes(field, types.NoneType):
            return None
        value = {} if value is True else named(value)
        if isinstance(value, dict):  # without a name, the first setting that has its fields
            fitting = [
                k for k, x in settings.items() if {*value} <= {*inspect.signature(x).parameters}
            ]
            value = {"name": [*fitting, *settings][0], **value}
        check("", {path: value}, {path: Spec})
        kind = value["name"] if "" not in settings else ""  # the name of a `Start` is a folder
        if kind not in settings:
            raise ValueError(f"{path} has no setting {kind!r}{hint(kind, settings)}")
        return _complete(value, settings[kind], path)
    check("", {path: value}, {path: field.type})
    for item in value if isinstance(value, list) else [value]:
        fits = not isinstance(item, str) or item in rule.get("choices", (item,))
        if isinstance(item, int | float) and not isinstance(item, bool):
            fits = rule.get("least", item) <= item < rule.get("below", item + 1)
        if not fits:
            raise ValueError(f"{path} must be {allowed_values(field)}, not {item!r}")
    return value


def check(name: str, values: Mapping[str, Any], annotations: Mapping[str, Any]) -> None:
    """Raises TypeError if a value of a config contradicts its annotation; messages call it `name`.

    A list may stand for a tuple, and a whole number for a float. A value passes without an
    annotation, or with one that a config does not understand.
    """
    for key, value in values.items():
        fits, words = _judge(value, annotations.get(key, Any))
        if not fits:
            title = f"{name}: {key}" if name else key
            raise TypeError(f"{title} must be {words or 'left out'}, not {value!r}")


def _judge(value: Any, annotation: Any) -> tuple[bool, str]:
    """Tells whether a value fits a type, and returns the type in words."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in _PLAIN:
        type_, words = _PLAIN[annotation]
        return isinstance(value, type_) and isinstance(value, bool) == (type_ is bool), words
    if annotation is Spec:
        name = named(value).get("name") if isinstance(value, dict | str) else None
        return isinstance(name, str), "a name or dict(name='...', ...)"
    if origin in (typing.Union, types.UnionType):
        judged = dict.fromkeys(_judge(value, argument) for argument in arguments)
        return any(fits for fits, _ in judged), " or ".join(words for _, words in judged if words)
    if origin is typing.Literal:
        return value in arguments, " or ".join(map(repr, arguments))
    kind = origin or annotation
    if kind in (tuple, list, abc.Sequence):
        words = f"a list ({inspect.formatannotation(annotation)})" if arguments else "a list"
        if not isinstance(value, list | tuple) or not arguments:
            return isinstance(value, list | tuple), words
        is_fixed = kind is tuple and arguments[-1] is not ...
        item_types = arguments if is_fixed else arguments[:1] * len(value)
        fits = all(_judge(*pair)[0] for pair in zip(value, item_types, strict=False))
        return fits and len(value) == len(item_types), words
    if kind in (dict, abc.Mapping):
        values = value.values() if isinstance(value, dict) and arguments else ()
        return isinstance(value, dict) and all(_judge(x, arguments[1])[0] for x in values), "a dict"
    if kind is abc.Callable:
        return callable(value), "a function"
    # Other types are such as an array, which no config can hold.
    is_known = isinstance(annotation, type) and annotation is not Any
    return not is_known or isinstance(value, annotation), ""


class Digests(NamedTuple):
    """SHA-256 of a run, and of its parts. `weights` is None without a pretrained file."""

    run: str
    config: str
    data: str
    weights: str | None
    start: str | None = None  # the runs, and their steps, that give the first parameters


def essential(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a completed config that can change a result."""
    fields = {name: value for name, value in config.items() if name not in _IRRELEVANT}
    for name, paths in _ELSEWHERE.items():
        if isinstance(fields.get(name), dict):  # {"name": "glyphs"} is what "glyphs" means
            fields[name] = short({k: v for k, v in fields[name].items() if k not in paths})
    return fields


def digests_of(
    config: dict[str, Any], *, data: str, weights: str | None = None, start: str | None = None
) -> Digests:
    """Returns the digests of a run, from its completed config and the digests of its files.

    `data` is `data.digest.digest` of the data set, `weights` is `weights.file_digest` of the file,
    and `start` is `train.start.digest` of the runs that this one starts from. Two runs with one
    digest give the same result on the same devices. A digest is a pure function of the config.
    """
    content = {"config": essential(config), "data": data, "weights": weights, "start": start}
    return Digests(json_digest(content), config_digest(config), data, weights, start)


def config_digest(config: dict[str, Any]) -> str:
    """Returns the digest of the essential fields of a completed config."""
    return json_digest(essential(config))
