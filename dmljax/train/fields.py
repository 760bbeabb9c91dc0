"""The fields of a config: their names, defaults and types."""

from __future__ import annotations

import functools
import json
from typing import Any

from dmljax.hints import hint
from dmljax.train import config as config_lib
from dmljax.train import registry

__all__ = ["complete", "named"]

# Fields with defaults, which hold where a config leaves a field out. Other fields are unknown.
_DEFAULTS: dict[str, Any] = {
    "seed": 0,
    "steps": None,  # a number, or '60 epochs'
    "transform": "standard_train",
    "eval_transform": "standard_eval",
    "normalize": None,  # what the weights, or the net, expect
    "unreadable": "raise",  # or 'skip': images that cannot be read
    "sampler": {"name": "plan", "classes": 32, "per_class": 4},
    "miner": None,
    "chunk": None,  # images that the net sees at a time; None: the whole batch
    "optimizer": {"name": "adam", "rate": 1e-4},
    "schedule": "cosine",
    "reload_best_at": (),
    "validation": 0.0,
    "select": "last",
    "evaluate": {},
    "checkpoint": {},
    "log_every": 20,
    "pictures": True,
    "notes": "",
    "runtime": {},
}
_REQUIRED = ("dataset", "net", "loss", "method")
_SECTIONS: dict[str, dict[str, Any]] = {
    "evaluate": {
        "every": None,  # steps, or '5 epochs'; None: once, after the last step
        "metrics": None,  # names of scores; None: all
        "ks": (1, 2, 4, 8),
        "clustering": True,
        "batch_size": 256,
        "knn": 0,
        "seeds": (0, 1, 2),
        "refine": False,
        "frames": False,
    },
    "checkpoint": {"every": None, "keep": 2},
    # Options that cannot change a result, and so may differ when a run is resumed.
    "runtime": {
        "workers": 0,
        "cache": False,
        "devices": None,
        "sharded": (),  # paths of parameters to split over the devices
    },
}
# Types of fields whose default has another type.
_OTHER_TYPES = {
    "chunk": "int | None",
    "devices": "int | None",
    "metrics": "tuple | None",
    "select": "str",
}
_MINIMA = {
    "seed": 0,
    "log_every": 1,
    "chunk": 1,
    "evaluate.batch_size": 1,
    "evaluate.knn": 0,
    "checkpoint.keep": 1,
    "runtime.workers": 0,
    "runtime.devices": 1,
}


def complete(config: Any) -> dict[str, Any]:
    """The config with defaults filled in, as plain data that JSON can hold.

    Raises a one-line error for an unknown or missing field, a wrong type, or a value out of range.
    """
    config = json.loads(json.dumps(config_lib.plain(config)))
    field_names = {*_DEFAULTS, *_REQUIRED}
    for name in config:
        if name not in field_names:
            raise ValueError(f"the config has no field {name!r}{hint(name, field_names)}")
    if missing := sorted(set(_REQUIRED) - set(config)):
        raise ValueError(f"the config sets no {', '.join(missing)}")
    config = {**json.loads(json.dumps(_DEFAULTS)), **config}
    for name, defaults in _SECTIONS.items():
        if unknown := sorted(set(config[name]) - set(defaults)):
            raise ValueError(f"{name} has no {unknown[0]!r}{hint(unknown[0], defaults)}")
        config[name] = {**json.loads(json.dumps(defaults)), **config[name]}
        registry.check(name, config[name], _types(defaults))
    registry.check("the config", config, _types(_DEFAULTS))
    for field, minimum in _MINIMA.items():
        value = functools.reduce(dict.__getitem__, field.split("."), config)
        if value is not None and value < minimum:
            raise ValueError(f"{field} must be {minimum} or more, not {value}")
    if not 0 <= config["validation"] < 1:
        raise ValueError(f"validation must be a share of 0 to 1, not {config['validation']}")
    if config["unreadable"] not in ("raise", "skip"):
        raise ValueError(f"unreadable must be 'raise' or 'skip', not {config['unreadable']!r}")
    if config["steps"] is None:
        raise ValueError("the config sets no steps: a number, or '60 epochs'")
    return config


def named(spec: Any) -> dict[str, Any]:
    """A name as `{"name": ...}`; a dict as it is."""
    return {"name": spec} if isinstance(spec, str) else spec


def _types(defaults: dict[str, Any]) -> dict[str, str]:
    """The types of fields, except those that hold a name, which may be a dict as well."""
    types = {k: type(v).__name__ for k, v in defaults.items() if isinstance(v, int | float | tuple)}
    return types | {name: type_ for name, type_ in _OTHER_TYPES.items() if name in defaults}
