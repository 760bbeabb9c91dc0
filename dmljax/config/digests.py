"""Digests that tell whether two runs are the same run, wherever their files lie."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from dmljax import renames
from dmljax.config import old_defaults, old_names
from dmljax.config.files import plain
from dmljax.train.options import SECTIONS, Options, fields_of

# Sections of a config that cannot change a result, and fields that say where files lie. The content
# of those files has a digest of its own. A completed config holds `size` in both transforms, too.
_IRRELEVANT = ("runtime", "notes", "pictures", "size")
PATHS = {"dataset": ("root", "path", "data_dir"), "net": ("weights",)}


class Digests(NamedTuple):
    """SHA-256 of a run, and of what it is made of. `weights` is None without a pretrained file."""

    run: str
    config: str
    data: str
    weights: str | None
    start: str | None = None  # the runs, and their steps, that give the first parameters


def essential(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a completed config that can change a result."""
    config = old_names.current_fields(config)
    left_out: tuple[str, ...] = (*_IRRELEVANT, "start", "mixed_with")
    if config.get("start") is None:
        left_out += ("start_takes",)
    fields = {name: value for name, value in config.items() if name not in left_out}
    fields = _without_new(fields, Options)
    for name, section in SECTIONS.items():
        if name in fields:
            fields[name] = _without_new(fields[name], section)
    for name, paths in PATHS.items():
        if isinstance(fields.get(name), dict):
            fields[name] = {k: v for k, v in fields[name].items() if k not in paths}
            if set(fields[name]) == {"name"}:  # {"name": "glyphs"} is what "glyphs" means
                fields[name] = fields[name]["name"]
    return _renamed(fields, renames.FUNCTIONS)


def _renamed(fields: dict[str, Any], names: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """The fields with other names of samplers and metrics: `names` is {kind: {name: other}}.

    `essential` has the names of today, and a digest the first ones: so configs of older runs are
    equal to new ones, and their digests stay valid.
    """

    def renamed(kind: str, spec: Any) -> Any:
        if isinstance(spec, dict):
            return {k: renamed(kind, v) if k == "name" else v for k, v in spec.items()}
        return names[kind].get(spec, spec)

    fields = {k: renamed("sampler", v) if k == "sampler" else v for k, v in fields.items()}
    if isinstance(evaluate := fields.get("evaluate"), dict):
        lists = {k: evaluate[k] for k in ("metrics", "extra") if evaluate.get(k)}
        lists = {k: [renamed("metric", spec) for spec in specs] for k, specs in lists.items()}
        fields["evaluate"] = {**evaluate, **lists}
    return fields


def _without_new(values: dict[str, Any], section: type) -> dict[str, Any]:
    """The values without fields that older versions did not have, where they are at their default.

    So the folders and the digests of older runs stay valid.
    """
    fields = fields_of(section).items()
    # As `fields.complete` writes defaults: a tuple is a list.
    defaults = plain({name: f.default for name, f in fields if f.metadata.get("is_new")})
    return {
        name: value
        for name, value in values.items()
        if name not in defaults or plain(value) != defaults[name]
    }


def config_digest(config: dict[str, Any]) -> str:
    """The digest of the essential fields of a completed config."""
    return _digest(_in_digest(config))


def run_digest(
    config: dict[str, Any], *, data: str, weights: str | None = None, start: str | None = None
) -> str:
    """The digest of a run: of its completed config, its data and its pretrained weights.

    `data` is `data.digest.digest` of the data set, `weights` is `weights.file_digest` of the file,
    and `start` is the digest of the run that this one starts from (`start.find`). Two runs with one
    digest give the same result on the same devices.
    """
    content = {"config": _in_digest(config), "data": data, "weights": weights}
    return _digest(content if start is None else {**content, "start": start})


def of_config(
    config: dict[str, Any], *, data: str, weights: str | None, start: str | None
) -> Digests:
    """All digests of a completed config, from the digests of its files."""
    run = run_digest(config, data=data, weights=weights, start=start)
    return Digests(run, config_digest(config), data, weights, start)


def _in_digest(config: dict[str, Any]) -> dict[str, Any]:
    """The essential fields with the first names of functions, and nets as they were written."""
    first_names = {k: {b: a for a, b in names.items()} for k, names in renames.FUNCTIONS.items()}
    if "net" in config:
        config = {**config, "net": old_defaults.without_old_resize(config["net"])}
    first_fields = {new: old for old, new in old_names.FIELDS.items()}
    content = {first_fields.get(name, name): value for name, value in essential(config).items()}
    return _renamed(content, first_names)


def _digest(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
