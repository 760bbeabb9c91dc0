"""Fields of a config of version 0.1.0 under their names of today, with a warning.

So configs and run folders of that version can be read. This file goes after the next version.
"""

from collections.abc import Mapping
from typing import Any

from dmljax import renames

Spec = dict[str, Any]
FIELDS = {"carried": "start_takes"}
_NAMES = {  # of fields of `config.method`
    "activation": "activation_fn",
    "embedding_init": "dense_fn",
    "form": "reconstruction_fn",
    "mask": "mask_fn",
    "mlp": "mlp_fn",
    "pairs": "pairs_fn",
    "pool": "pool_fn",
    "proxy_std": "proxy_init",
}
# Values that changed, by today's names of their fields.
_VALUES: dict[str, dict[str, Any]] = {
    "dense_fn": {"torch": "Dense", "kaiming_fan_out": "kaiming_dense", "glorot": "glorot_dense"},
    "mlp_fn": {"relu": "mlp", "none": None},
    "norms": {
        "none": (),
        "shared": ("norm",),
        "nested": ("norm", "norm_mean", "norm_log_variance"),
    },
    "pairs_fn": {"all": None, "drawn": "drawn_pairs"},
    "pool_fn": {
        "mean": None,
        "max": "global_max",
        "mean_max": "global_mean_max",
        "gem": "learned_gem",
    },
    "reconstruction_fn": {
        name: f"reconstruction_{name}" for name in ("norm", "half_sum", "mean_square")
    },
    "release": {"second": (False, True), "never": (False, False), "always": (True, True)},
}
_PHASES = ((1.0, 0.5, 0.5, 1.0), (0.8, 1.0, 0.4, 0.8))
_REPORT = {"dim": 128, "samples": 1, "activation": "relu", "probe": True}
_REPORT |= {"lambdas": _PHASES, "phase_at": 1600}
_CODE = {"norms": "nested", "decoder_norm": True, "form": "half_sum", "release": "never"}
_MODES: dict[str, Spec] = {
    "paper": {},
    "report": _REPORT | {"frozen_decoder": True},
    "seed": _REPORT | _CODE | {"decay": 5e-3},
}


def current_fields(config: Any, *, warn: bool = False) -> Any:
    """A config whose fields have their names of today. With `warn`, warns of old ones."""
    if not isinstance(config, Mapping):
        return config
    for old in FIELDS.keys() & config.keys() if warn else ():
        renames.warn(
            f"the field {old!r} of the config is an old name and works in this version for the "
            f"last time: write {FIELDS[old]!r}",
        )
    return {FIELDS.get(name, name): value for name, value in config.items()}


def current_method(spec: Any) -> Any:
    """`config.method` with the fields of today. Warns in one line if it has old ones."""
    if not isinstance(spec, Mapping):
        return spec
    change = {"abe": _abe, "dvml": _dvml, "graph": _graph, "proxies": _proxies}.get(
        str(spec.get("name"))
    )
    method = dict(spec) if change is None else change(dict(spec))
    method = {_NAMES.get(field, field): value for field, value in method.items()}
    for field, values in _VALUES.items():
        value = method.get(field)
        name = value.get("name") if isinstance(value, Mapping) else value
        if isinstance(name, str) and name in values:
            new = values[name]
            method[field] = {**value, "name": new} if isinstance(value, Mapping) else new
    if old := sorted(field for field in spec if method.get(field, _NAMES) != spec[field]):
        changed = {k: v for k, v in method.items() if k not in spec or spec[k] != v}
        today = f"is now written as {changed}"
        if "multiple" in old:
            today = "is no longer needed"
        renames.warn(
            f"config.method: {', '.join(old)} of {spec['name']} {today}; the old fields work in "
            "this version for the last time",
        )
    return method


def current_runtime(values: Any) -> Any:
    """`config.runtime` with the fields of today: `sharded` was a list of paths of parameters."""
    paths = values.get("sharded") if isinstance(values, Mapping) else None
    if not isinstance(paths, list | tuple):
        return values
    if paths:
        renames.warn(
            f"runtime.sharded={list(paths)} is now written as 'classes'; the list works in this "
            "version for the last time",
        )
    return {**values, "sharded": "classes" if paths else None}


def _proxies(method: Spec) -> Spec:
    """Rows of zeros are now added by `runtime.sharded`, as many as the devices need."""
    return {k: v for k, v in method.items() if k != "multiple"}


def _abe(method: Spec) -> Spec:
    """`heads=True` is now `attention=None`; the divergence is a function with a margin."""
    heads = method.pop("heads", False)
    if heads:
        method = {k: v for k, v in method.items() if k not in ("attention_pools", "mask")}
        method["attention"] = None
    margin, kind = method.pop("margin_div", 1.0), method.pop("divergence_pairs", "sum")
    if (margin, kind) != (1.0, "sum"):
        name = "divergence" if kind == "sum" else "mean_divergence"
        method["divergence_fn"] = {"name": name, "margin": margin}
    return method


def _dvml(method: Spec) -> Spec:
    """A mode was a set of values for the fields that the config left out."""
    method = {k: v for k, v in method.items() if v is not None}
    method = {"name": "dvml", **_MODES[method.pop("mode", "paper")], **method}
    if method.pop("baseline", False):
        method["variational"] = False
    if method.pop("frozen_decoder", False):
        method["train_decoder"] = (False, True)
    return method


def _graph(method: Spec) -> Spec:
    """GAT had two sub-layers by default. Edges are now a function with its options."""
    if "attention" in method:
        attention = method.pop("attention")
        name = attention["name"] if isinstance(attention, Mapping) else attention
        if name in ("gat", "gatv2"):
            options = attention if isinstance(attention, Mapping) else {"name": name}
            attention = {"sublayers": 2, **options}
        method["attention_fn"] = None if name == "none" else attention
    threshold, weighted = method.pop("threshold", None), method.pop("weighted", False)
    similarity, positive = method.pop("similarity", None), method.pop("positive", None)
    if threshold is not None or weighted:
        edges = {"name": "similarity_graph" if weighted else "similarity_edges"}
        edges |= {} if threshold is None else {"threshold": threshold}
        edges |= {"similarity_fn": "dot_products"} if similarity == "dot" else {}
        edges |= {} if positive is None else {"positive_fn": positive}
        method["edges_fn"] = edges
    return method
