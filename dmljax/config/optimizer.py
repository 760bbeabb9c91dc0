"""Builds the optimizer of a run, with its schedule and its groups of parameters."""

import functools
import re
from collections.abc import Collection, Sequence
from typing import Any

import optax

from dmljax import adapt
from dmljax.adapt.trees import paths_of, paths_under
from dmljax.config.data import EpochEnd, steps
from dmljax.config.registry import extras_of
from dmljax.files import schema
from dmljax.hints import check_all
from dmljax.train import optimizers
from dmljax.train.options import Options

_GROUP = {"factor": float, "decay": float | None, "l2": float | None, "frozen": bool}


def optimizer_of(
    options: Options,
    total: int,
    epoch_end: EpochEnd,
    *,
    frozen: Collection[str],
    params: Any,
    backbone: Sequence[str],
) -> optax.GradientTransformation:
    """Returns the optimizer; parameters at the paths `frozen` do not learn, whatever groups say.

    `params` may hold shapes. `layer_decay` applies to the parameters in the folders `backbone`.
    Raises unless every group matches a parameter, and the layers have numbers.
    """
    spec, to_steps = options.optimizer, functools.partial(steps, epoch_end=epoch_end)
    keywords = {k: spec[k] for k in extras_of("optimizer") if k in spec}
    groups = []
    for i, group in enumerate(keywords.get("groups", ())):
        field = f"optimizer.groups.{i}"
        for name, value in group.items():
            schema.parse(_GROUP.get(name, Any), value, f"{field}.{name}")
        start = to_steps(group.get("from", 0), field=f"{field}.from")
        groups.append({**group, "from": start})
    pattern = "|".join(map(re.escape, sorted(frozen)))
    frozen_groups = [{"path": f"^({pattern})$", "frozen": True}] if frozen else []
    keywords["groups"] = [*frozen_groups, *groups]
    lengths: dict[str, Any] = {}
    if "warmup" in options.schedule:
        lengths["warmup"] = to_steps(options.schedule["warmup"], field="schedule.warmup")
    if "at" in options.schedule:
        lengths["at"] = [to_steps(at, field="schedule.at") for at in options.schedule["at"]]
    schedule = options.schedule.partial(total=total, **lengths)
    optimizer = optimizers.build(spec.function(), schedule=schedule, backbone=backbone, **keywords)
    paths = paths_of(params)
    net_paths, layer_decay = paths_under(backbone, paths), spec.get("layer_decay", 1.0)
    some = ", ".join(paths[:: max(1, len(paths) // 4)])
    problems = {
        f"optimizer.groups: {group['path']!r} matches no parameter, such as {some}": (
            not any(re.search(group["path"], path) for path in paths)
        )
        for group in groups
    }
    problems |= {
        f"optimizer.layer_decay={layer_decay}: this net has no blocks in a known order (its "
        f"parameters are {', '.join(net_paths[:3])}, ...): leave it out, or write optimizer.groups "
        "with a factor for each layer": layer_decay != 1 and not adapt.blocks(net_paths).total,
        "optimizer.average and reload_best_at exclude each other (the average would keep "
        "parameters from before the reload): leave out one of them": bool(
            keywords.get("average") and options.reload_best_at
        ),
    }
    check_all(problems)
    return optimizer
