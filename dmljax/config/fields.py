"""A config as plain data: checked, completed and hashed. Imports no jax."""

import dataclasses
import json
import typing
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from dmljax.config.registry import chosen
from dmljax.files import schema
from dmljax.files.writing import json_digest
from dmljax.train.options import SECTIONS, Options, Spec

# Fields that say where files are; the content of those files has a digest of its own.
PATHS = {"dataset": ("root", "path", "data_dir"), "net": ("weights",)}
# Fields that cannot change a result, so that any later command may change them.
MOVABLE = ("runtime", "notes", "pictures", *(f"{x}.{y}" for x in PATHS for y in PATHS[x]))
# The digest of a start stands for its folders, and both transforms hold `size`.
_WITHOUT_DIGEST = (*MOVABLE, "size", "start.name", "start.mixed_with")


def plain(config: Any) -> Any:
    """Returns a ConfigDict, options, or anything nested, as dicts, lists and scalars."""
    if dataclasses.is_dataclass(config):
        config = vars(config)
    if isinstance(config, Mapping) or hasattr(config, "items"):
        return {str(k): plain(v) for k, v in config.items()}
    return [plain(v) for v in config] if isinstance(config, list | tuple) else config


def named(spec: Any) -> Any:
    """Returns a name as `{"name": ...}`, and other values unchanged."""
    return {"name": spec} if isinstance(spec, str) else spec


def short(spec: Any) -> Any:
    """Returns `{"name": ...}` as that name, and other values unchanged."""
    return spec["name"] if isinstance(spec, dict) and set(spec) == {"name"} else spec


def with_normalization(config: Any, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the completed config with its normalization, for the run folder."""
    config = complete(config)
    normalization = plain({k: v for k, v in spec.items() if k != "force"})
    return {**config, "normalize": config["normalize"] or normalization}


def parse(config: Any) -> Options:
    """Returns the checked options of a config; its names are not looked up yet.

    `size` is also filled into the two transforms, where they do not set it, and `evaluate.frozen`
    is decided. Raises a one-line error for an unknown or missing field, a wrong type, or a value
    out of range.
    """
    config = plain(config)
    json.dumps(config)  # raises for what a file cannot hold
    options: Options = schema.parse(Options, _written_out(config, Options))
    changes: dict[str, Any] = {}
    if options.size is not None:
        for name in ("transform", "eval_transform"):
            changes[name] = Spec({"size": options.size, **getattr(options, name)})
    if options.evaluate.frozen is None:
        frozen = options.has_pretrained
        changes["evaluate"] = dataclasses.replace(options.evaluate, frozen=frozen)
    return dataclasses.replace(options, **changes)


def complete(config: Any) -> dict[str, Any]:
    """Returns the config with its defaults as plain data; raises as `parse` does."""
    return plain(parse(config))


def _written_out(values: Any, section: Any) -> Any:
    """Returns the values of a section with every setting as a dict.

    A setting may be a name, `True` for its defaults, `None`, `False` or 0 for none, a number for
    its first field, or fields without a name, which select the first setting that has them.
    """
    values = dict(values) if isinstance(values, dict) else values
    for field in dataclasses.fields(section) if isinstance(values, dict) else ():
        arms = typing.get_args(field.type) or (field.type,)
        settings = [arm for arm in arms if dataclasses.is_dataclass(arm)]
        if field.name not in values or not settings:
            continue
        value = values[field.name]
        if field.name in SECTIONS:
            value = _written_out(value, field.type)
        elif not value and type(None) in arms and not isinstance(value, dict):
            value = None
        elif isinstance(value, str):
            value = {"name": value}
        elif value is True:
            value = {}
        elif isinstance(value, int | float):
            value = {x.name: value for x in dataclasses.fields(settings[0])[1:2]} or value
        if isinstance(value, dict) and "name" not in value and field.name not in SECTIONS:
            fitting = [x for x in settings if {*value} <= {*x.__dataclass_fields__}]
            name = ([*fitting, *settings][0]).__dataclass_fields__["name"].default
            value = {"name": name, **value}
        values[field.name] = value
    return values


def options_of(config: Any, only: Collection[str] | None = None) -> Options:
    """Returns the options of a config, with a function in every `Spec`.

    Raises a one-line error for an unknown name, an unknown argument or a value of a wrong type.
    With `only`, names in other fields stay plain data, and their modules are not imported.
    """
    options = parse(config)
    evaluate = _resolved(options.evaluate, only)
    return dataclasses.replace(_resolved(options, only), evaluate=evaluate)


def _resolved(options: Any, only: Collection[str] | None) -> Any:
    """Returns a section of options with a function in every `Spec`."""
    changes: dict[str, Any] = {}
    for field, value in vars(options).items():
        if isinstance(value, Spec) and (only is None or field in only):
            changes[field] = chosen(field, value)
        elif field == "metrics" and only is None:
            changes[field] = tuple(x if x["name"] == "all" else chosen(field, x) for x in value)
    return dataclasses.replace(options, **changes)


class Digests(NamedTuple):
    """SHA-256 of a run, and of its parts. `weights` is None without a pretrained file."""

    run: str
    config: str
    data: str
    weights: str | None
    start: str | None = None  # the runs, and their steps, that give the first parameters


def essential(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the fields of a completed config that can change a result, without paths."""
    return {
        name: essential(value, f"{prefix}{name}.") if isinstance(value, dict) else value
        for name, value in config.items()
        if f"{prefix}{name}" not in _WITHOUT_DIGEST
    }


def digests_of(
    config: dict[str, Any], *, data: str, weights: str | None = None, start: str | None = None
) -> Digests:
    """Returns the digests of a run, from its completed config and the digests of its files.

    `data` is `data.digest.digest` of the data set, `weights` is `file_digest` of the file, and
    `start` is `train.start.digest` of the runs that this one starts from. Two runs with one
    digest give the same result on the same devices. A digest is a pure function of the config.
    """
    content = {"config": essential(config), "data": data, "weights": weights, "start": start}
    return Digests(json_digest(content), config_digest(config), data, weights, start)


def config_digest(config: dict[str, Any]) -> str:
    """Returns the digest of the essential fields of a completed config."""
    return json_digest(essential(config))
