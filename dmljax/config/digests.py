"""Digests that tell whether two runs are the same run, wherever their files lie."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

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
    left_out: tuple[str, ...] = (*_IRRELEVANT, "start", "mixed_with")
    if config.get("start") is None:
        left_out += ("start_takes",)
    fields = {name: value for name, value in config.items() if name not in left_out}
    for name, paths in PATHS.items():
        if isinstance(fields.get(name), dict):
            fields[name] = {k: v for k, v in fields[name].items() if k not in paths}
            if set(fields[name]) == {"name"}:  # {"name": "glyphs"} is what "glyphs" means
                fields[name] = fields[name]["name"]
    return fields


def config_digest(config: dict[str, Any]) -> str:
    """The digest of the essential fields of a completed config."""
    return _digest(essential(config))


def run_digest(
    config: dict[str, Any], *, data: str, weights: str | None = None, start: str | None = None
) -> str:
    """The digest of a run: of its completed config, its data and its pretrained weights.

    `data` is `data.digest.digest` of the data set, `weights` is `weights.file_digest` of the file,
    and `start` is the digest of the run that this one starts from (`start.find`). Two runs with one
    digest give the same result on the same devices.
    """
    content = {"config": essential(config), "data": data, "weights": weights}
    return _digest(content if start is None else {**content, "start": start})


def of_config(
    config: dict[str, Any], *, data: str, weights: str | None, start: str | None
) -> Digests:
    """All digests of a completed config, from the digests of its files."""
    run = run_digest(config, data=data, weights=weights, start=start)
    return Digests(run, config_digest(config), data, weights, start)


def _digest(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
