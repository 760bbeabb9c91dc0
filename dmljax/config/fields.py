"""A config as plain data: checked, completed and hashed. Imports no jax."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from dmljax.config import annotations
from dmljax.config import files as config_files
from dmljax.hints import hint
from dmljax.train.options import (
    SECTIONS,
    SETTINGS,
    Options,
    allowed_values,
    defaults_of,
    fields_of,
)

# Sections of a config that cannot change a result, and fields that say where files are. The content
# of those files has a digest of its own. A completed config holds `size` in both transforms, too.
_IRRELEVANT = ("runtime", "notes", "pictures", "size")
PATHS = {
    "dataset": ("root", "path", "data_dir"),
    "net": ("weights",),
}
_ELSEWHERE = {**PATHS, "start": ("name", "mixed_with")}  # the content of both has a digest
_OPTIONAL = ("evaluate.clustering", "held_out", "pictures", "start")  # settings that may be None


def complete(config: Any) -> dict[str, Any]:
    """Returns the config with defaults filled in, as plain data that JSON can hold.

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


def with_normalization(config: dict[str, Any], normalization: Any) -> dict[str, Any]:
    """Returns a completed config that names its normalization, for the run folder."""
    return {**config, "normalize": config["normalize"] or normalization}


def named(spec: Any) -> Any:
    """Returns a name as `{"name": ...}`; a dict, or None, unchanged."""
    return {"name": spec} if isinstance(spec, str) else spec


def short(spec: Any) -> Any:
    """Returns `{"name": ...}` as that name; a dict with more fields, a name, or None, unchanged."""
    return spec["name"] if isinstance(spec, dict) and set(spec) == {"name"} else spec


def _checked(values: Any, section: type, title: str) -> dict[str, Any]:
    """Returns the values of a section with its defaults; raises if one does not fit its field."""
    fields, prefix = fields_of(section), "" if section is Options else f"{title}."
    if not isinstance(values, dict):
        raise TypeError(f"{title} has the fields {', '.join(fields)}, so it cannot be {values!r}")
    if unknown := sorted(set(values) - set(fields)):
        noun = "field " if section is Options else ""
        raise ValueError(f"{title} has no {noun}{unknown[0]!r}{hint(unknown[0], fields)}")
    values = config_files.plain(defaults_of(section)) | values
    if missing := [name for name in fields if name not in values]:
        meaning = fields[missing[0]].metadata["meaning"]
        raise ValueError(f"{title} does not set {', '.join(missing)} ({missing[0]}: {meaning})")
    values = {name: values[name] for name in fields}
    annotations.check(title, values, {n: f.type for n, f in fields.items() if _is_plain(f)})
    for name, field in fields.items():
        path, value = f"{prefix}{name}", values[name]
        if path in SETTINGS:
            values[name] = _setting(path, value)
        elif not _fits(value, field):
            raise ValueError(f"{path} must be {allowed_values(field)}, not {value!r}")
        elif str(field.type).startswith("Spec") and not _is_spec(value, field):
            advice = ""
            if isinstance(value, dict) and "name" not in value:
                advice = f": set the name of the function, by --config.{name}.name=..."
            raise TypeError(
                f"{name} must be a name or dict(name='...', ...), not {value!r}{advice}"
            )
    return values


def _setting(path: str, value: Any) -> dict[str, Any] | None:
    """Returns one of several settings (`options.SETTINGS`) as a dict with all of its fields.

    True stands for the first setting, False for None, and a number for a fraction of classes. A
    dict without a name belongs to the first setting that has its fields.
    """
    settings = SETTINGS[path]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if path == "held_out" and is_number:
        value = {"name": "last", "fraction": value} if value else None
    if (value is None or value is False) and path in _OPTIONAL:
        return None
    value = named(next(iter(settings)) if value is True else value)
    if isinstance(value, dict) and "name" not in value and path != "start":
        names = (name for name, kind in settings.items() if set(value) <= set(fields_of(kind)))
        value = {"name": next(names, next(iter(settings))), **value}
    elif isinstance(value, dict) and path == "start":
        value = {"name": "", **value}  # a study fills it in
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise TypeError(f"{path} must be a name or dict(name='...', ...), not {value!r}")
    name = "" if path == "start" else value["name"]
    if name not in settings:
        raise ValueError(f"{path} has no setting {name!r}{hint(name, settings)}")
    return _checked(value, settings[name], path)


def _is_plain(field: Any) -> bool:
    """Tells whether a field needs no further check of its type, unlike a `Spec` or a `Length`."""
    return field.name not in SECTIONS and not str(field.type).startswith(("Spec", "Length"))


def _fits(value: Any, field: Any) -> bool:
    """Tells whether a value of the right type is one of the choices of its field, or in bounds."""
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
        if isinstance(fields.get(name), dict):
            fields[name] = {k: v for k, v in fields[name].items() if k not in paths}
            if set(fields[name]) == {"name"}:  # {"name": "glyphs"} is what "glyphs" means
                fields[name] = fields[name]["name"]
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
    return Digests(_sha256(content), _sha256(content["config"]), data, weights, start)


def config_digest(config: dict[str, Any]) -> str:
    """Returns the digest of the essential fields of a completed config."""
    return _sha256(essential(config))


def _sha256(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
