"""The fields of a config: their names, defaults and types."""

from __future__ import annotations

import functools
import json
from typing import Any

from dmljax.config import files as config_files
from dmljax.config import registry
from dmljax.hints import hint

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
    "start": None,  # the folder of a run whose parameters are the first
    "carried": "all",  # of that run: all that fits, or 'backbone'
    "trained": "all",  # or 'last': the pretrained backbone stays as it is
    "validation": 0.0,
    "fold": None,  # or 0 to folds - 1: the training classes that are held out
    "folds": 4,
    "fold_seed": None,  # None: contiguous classes; a number: shuffled
    "select": "last",
    "patience": None,  # evaluations that the best one may be old before the run ends
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
        "extra": (),  # names of further scores
        "ks": (1, 2, 4, 8),
        "depth": None,  # a number or 'max_bin_count': where mAP and MRR are also cut
        "clustering": True,  # or 'end': after the last step alone
        "starts": 1,  # of k-means, of which the least inertia counts
        "batch_size": 256,
        "knn": 0,
        "seeds": (0, 1, 2),
        "refine": False,
        "mean_distance": False,  # rank also by the mean of the parts' distances
        "average": "queries",  # or 'classes': the mean over classes of each class's mean
        "frames": False,
        "projector": 0,  # test images in TensorBoard's projector
        "frame_ms": 200,  # of the movie
        "last_frame_ms": 3000,
        "call": None,  # 'my_package.my_module:my_function', called after each evaluation
    },
    "checkpoint": {"every": None, "keep": 2},
    # Options that cannot change a result, and so may differ when a run is resumed.
    "runtime": {
        "workers": 0,
        "cache": False,
        "devices": None,
        "deterministic": False,  # the same bits in every run on a GPU, too
        "sharded": (),  # paths of parameters to split over the devices
    },
}
# Types of fields whose default has another type.
_OTHER_TYPES = {
    "call": "str | None",
    "chunk": "int | None",
    "clustering": "bool | str",
    "depth": "int | str | None",
    "devices": "int | None",
    "fold": "int | None",
    "fold_seed": "int | None",
    "metrics": "tuple | None",
    "patience": "int | None",
    "select": "str",
    "start": "str | None",
    "carried": "str",
    "trained": "str",
}
_MINIMA = {
    "seed": 0,
    "log_every": 1,
    "chunk": 1,
    "fold_seed": 0,
    "patience": 0,
    "evaluate.batch_size": 1,
    "evaluate.knn": 0,
    "evaluate.projector": 0,
    "evaluate.frame_ms": 20,
    "evaluate.last_frame_ms": 20,
    "evaluate.starts": 1,
    "checkpoint.keep": 1,
    "runtime.workers": 0,
    "runtime.devices": 1,
}


def complete(config: Any) -> dict[str, Any]:
    """The config with defaults filled in, as plain data that JSON can hold.

    Raises a one-line error for an unknown or missing field, a wrong type, or a value out of range.
    """
    config = json.loads(json.dumps(config_files.plain(config)))
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
    if config["carried"] not in ("all", "backbone"):
        raise ValueError(f"carried must be 'all' or 'backbone', not {config['carried']!r}")
    if config["trained"] not in ("all", "last"):
        raise ValueError(f"trained must be 'all' or 'last', not {config['trained']!r}")
    _check_evaluate(config["evaluate"])
    if config["steps"] is None:
        raise ValueError("the config sets no steps: a number, or '60 epochs'")
    return config


def _check_evaluate(options: dict[str, Any]) -> None:
    if options["clustering"] not in (True, False, "end"):
        raise ValueError(
            f"evaluate.clustering must be True, False or 'end', not {options['clustering']!r}"
        )
    depth = options["depth"]
    if depth is not None and (depth != "max_bin_count" if isinstance(depth, str) else depth < 1):
        raise ValueError(
            f"evaluate.depth must be a number from 1 on, or 'max_bin_count', not {depth!r}"
        )


def named(spec: Any) -> dict[str, Any]:
    """A name as `{"name": ...}`; a dict as it is."""
    return {"name": spec} if isinstance(spec, str) else spec


def _types(defaults: dict[str, Any]) -> dict[str, str]:
    """The types of fields, except those that hold a name, which may be a dict as well."""
    types = {k: type(v).__name__ for k, v in defaults.items() if isinstance(v, int | float | tuple)}
    return types | {name: type_ for name, type_ in _OTHER_TYPES.items() if name in defaults}
