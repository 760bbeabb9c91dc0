"""The optimizer and the schedule that a config names."""

import inspect
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import optax

from dmljax import adapt
from dmljax.config import registry
from dmljax.train import optimizers
from dmljax.train.options import Length, Options, Spec

_GROUP_FIELDS = {
    "path": "str",
    "factor": "float",
    "decay": "float | None",
    "l2": "float | None",
    "frozen": "bool",
    "from": "int | str",  # a step, or '1 epoch'
}
# (length, name of the field) -> steps.
StepsFn = Callable[[Length, str], int]


def optimizer_of(
    options: Options,
    *,
    steps_fn: StepsFn,
    total: int,
    frozen: Collection[str] = (),
    backbone: Sequence[str] = ("net",),
) -> optax.GradientTransformation:
    """The optimizer; the parameters at the paths `frozen` do not learn, whatever the groups say.

    `layer_decay` applies to the parameters in the folders `backbone`.
    """
    spec = dict(options.optimizer)
    parameters = inspect.signature(optimizers.build).parameters
    from_caller = ("direction", "schedule", "backbone")
    types = {k: parameters[k].annotation for k in parameters if k not in from_caller}
    keywords = {k: spec.pop(k) for k in list(spec) if k in types}
    registry.check("optimizer", keywords, types)
    paths = "|".join(map(re.escape, sorted(frozen)))
    frozen_groups = [{"path": f"^({paths})$", "frozen": True}] if frozen else []
    keywords["groups"] = [
        *frozen_groups,
        *(_group(g, steps_fn) for g in keywords.get("groups", ())),
    ]
    if keywords.get("average") and options.reload_best_at:
        raise ValueError(
            "optimizer.average and reload_best_at exclude each other (the average would keep "
            "parameters from before the reload): leave out one of them"
        )
    direction = registry.resolve("optimizer", spec, caller_keywords=types)()
    schedule = _schedule(options.schedule, steps_fn)(total=total)
    return optimizers.build(direction, schedule=schedule, backbone=backbone, **keywords)


def _schedule(spec: Spec, steps_fn: StepsFn) -> Callable[..., Any]:
    lengths: dict[str, int | list[int]] = {}
    if "warmup" in spec:
        lengths["warmup"] = steps_fn(spec["warmup"], "schedule.warmup")
    if "at" in spec:
        lengths["at"] = [steps_fn(at, "schedule.at") for at in spec["at"]]
    return registry.resolve("schedule", {**spec, **lengths})


def _group(group: Any, steps_fn: StepsFn) -> dict[str, Any]:
    """A group of parameters, with `from` as a step."""
    if not isinstance(group, dict):
        raise ValueError(f"optimizer.groups: write dict(path='^head/', ...), not {group!r}")
    registry.check("optimizer.groups", group, _GROUP_FIELDS)
    start = {"from": steps_fn(group["from"], "optimizer.groups.from")} if "from" in group else {}
    return group | start


def check_groups(optimizer: Spec, params: Any, *, backbone: Sequence[str] = ("net",)) -> None:
    """Raises unless every group of the optimizer matches a parameter, and layers have numbers."""
    paths = adapt.paths_of(params)
    for group in optimizer.get("groups", ()):
        if not any(re.search(group["path"], path) for path in paths):
            raise ValueError(
                f"optimizer.groups: {group['path']!r} matches no parameter, such as "
                f"{', '.join(paths[:: max(1, len(paths) // 4)])}"
            )
    net_paths = adapt.paths_under(backbone, paths)
    if optimizer.get("layer_decay", 1.0) != 1 and not adapt.blocks(net_paths).total:
        raise ValueError(
            f"optimizer.layer_decay={optimizer['layer_decay']}: this net has no blocks in a known "
            f"order (its parameters are {', '.join(net_paths[:3])}, ...): leave it out, or write "
            "optimizer.groups with a factor for each layer"
        )
