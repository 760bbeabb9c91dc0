"""When things happen in a run: lengths and intervals in steps, the sampler, the optimizer."""

import functools
import inspect
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import optax

from dmljax import adapt
from dmljax.config.fields import check
from dmljax.config.registry import extras_of
from dmljax.data import sampling
from dmljax.data.sampling import sampler as samplers
from dmljax.hints import check_all
from dmljax.train import optimizers
from dmljax.train.options import Length, Options, Spec

# epochs -> the step after which that many epochs of the sampler have ended
EpochEnd = Callable[[float], float]
_GROUP_FIELDS: dict[str, Any] = {
    **{"path": str, "factor": float, "decay": float | None, "l2": float | None},
    **{"frozen": bool, "from": int | str},
}


class Timing(NamedTuple):
    """A sampler, and lengths and intervals in steps; `Run` has fields of the same names."""

    steps: int
    batch_size: int
    evaluation_steps: Collection[int]
    checkpoint_steps: Collection[int]
    neighbor_steps: Collection[int]
    reload_steps: tuple[int, ...]
    sample_fn: Callable
    sampler_note: str


def timing_of(
    options: Options, labels: np.ndarray, epoch_labels: np.ndarray
) -> tuple[Timing, EpochEnd]:
    """Returns the sampler with the steps at which things happen, and the ends of its epochs.

    `labels` are of the training images; the sampler counts its epochs by `epoch_labels`.
    """
    chosen = options.sampler.partial
    sampler, groups = samplers.bind(chosen.func, **chosen.keywords), sampling.group(labels)
    batch_size = len(sampler(groups, seed=options.seed, step=0))
    epoch_end = samplers.epoch_end_fn(sampler, epoch_labels, seed=options.seed)
    total = steps(options.steps, epoch_end=epoch_end, field="steps")
    at = functools.partial(every, epoch_end=epoch_end, total=total)
    # Without an interval, once after the last step; a run may have no step.
    interval = max(total, 1) if options.evaluate.every is None else options.evaluate.every
    evaluation_steps = at(interval, field="evaluate.every")
    # By default, a run that is killed loses no more than a fifth of its steps.
    intervals = (options.checkpoint.every, options.evaluate.every, max(-(-total // 5), 1))
    saves = next(x for x in intervals if x is not None)
    note = ""
    if (classes := options.sampler.get("classes", 0)) > (count := len(groups.count)):
        note = f"a batch has all {count} classes instead of {classes}"
    neighbor_steps: Collection[int] = ()
    if "neighbors" in inspect.signature(chosen.func).parameters:
        search = options.sampler.get("every", "1 epoch")
        neighbor_steps = every(search, epoch_end=epoch_end, total=total - 1, field="sampler.every")
        if not neighbor_steps:
            note = "the run ends before the nearest classes are searched (sampler.every)"
    elif "every" in options.sampler:
        raise ValueError(
            f"sampler.every: {options.sampler['name']} does not use neighboring classes: leave it "
            "out"
        )
    reloads = tuple(
        steps(x, epoch_end=epoch_end, field="reload_best_at") for x in options.reload_best_at
    )
    first = min(evaluation_steps, default=total)
    if reloads and min(reloads) < first:
        raise ValueError(
            f"reload_best_at: {min(reloads)} is before the first evaluation, at {first}"
        )
    timing = Timing(
        total,
        batch_size,
        evaluation_steps,
        at(saves, field="checkpoint.every"),
        neighbor_steps,
        reloads,
        sampler.batch,
        note,
    )
    return timing, epoch_end


def steps(length: Length, *, epoch_end: EpochEnd, field: str = "length") -> int:
    """Returns the number of steps of a length: 500, '500 steps' or '60 epochs'.

    `field` is the field of the config that holds the length, for error messages.
    """
    count, is_epochs = _parse(length, field)
    if is_epochs:
        count = epoch_end(count)
    return max(1, round(count)) if isinstance(length, str) else round(count)


def every(
    length: Length, *, epoch_end: EpochEnd, total: int, field: str = "length"
) -> Collection[int]:
    """Returns the steps up to `total` at which something happens that is due once per `length`.

    If `length` is a whole number of epochs, these are the steps at which epochs of the sampler end;
    epochs may differ in length. Any other `length` is a fixed number of steps.
    """
    count, is_epochs = _parse(length, field)
    if not count:
        raise ValueError(f"{field}={length!r} is not an interval: write steps, or '1 epoch'")
    if not is_epochs or count < 1 or count != int(count):
        period = max(1, steps(length, epoch_end=epoch_end, field=field))
        return range(period, total + 1, period)
    ends: list[int] = []
    while not ends or ends[-1] < total:
        ends.append(max(1, round(epoch_end(count * (len(ends) + 1)))))
    return frozenset(end for end in ends if end <= total)


def _parse(length: Length, field: str) -> tuple[float, bool]:
    """Returns (60.0, True) for '60 epochs', and (500.0, False) for 500 steps."""
    match = re.fullmatch(r"(\d[\d_]*(?:\.\d*)?(?:e\d+)?)(?: (step|epoch)s?)?", str(length))
    if match is None or (isinstance(length, str) and match[2] is None):
        raise ValueError(f"{field}={length!r} is not a duration: write 500, or '60 epochs'")
    return float(match[1]), match[2] == "epoch"


def optimizer_of(
    options: Options,
    timing: Timing,
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
    chosen = options.optimizer
    keywords = {k: chosen[k] for k in extras_of("optimizer") if k in chosen}
    groups = [_group(group, epoch_end) for group in keywords.get("groups", ())]
    pattern = "|".join(map(re.escape, sorted(frozen)))
    frozen_groups = [{"path": f"^({pattern})$", "frozen": True}] if frozen else []
    keywords["groups"] = [*frozen_groups, *groups]
    schedule = _schedule(options.schedule, epoch_end)(total=timing.steps)
    optimizer = optimizers.build(
        chosen.function(), schedule=schedule, backbone=backbone, **keywords
    )
    paths = adapt.paths_of(params)
    for group in groups:
        if not any(re.search(group["path"], path) for path in paths):
            raise ValueError(
                f"optimizer.groups: {group['path']!r} matches no parameter, such as "
                f"{', '.join(paths[:: max(1, len(paths) // 4)])}"
            )
    net_paths, layer_decay = adapt.paths_under(backbone, paths), chosen.get("layer_decay", 1.0)
    problems = {
        f"optimizer.layer_decay={layer_decay}: this net has no blocks in a known order (its "
        f"parameters are {', '.join(net_paths[:3])}, ...): leave it out, or write optimizer.groups "
        "with a factor for each layer": layer_decay != 1 and not adapt.blocks(net_paths).total,
        "optimizer.average and reload_best_at exclude each other (the average would keep "
        "parameters from before the reload): leave out one of them": bool(
            keywords.get("average") and timing.reload_steps
        ),
    }
    check_all(problems)
    return optimizer


def _schedule(chosen: Spec, epoch_end: EpochEnd) -> Callable[..., Any]:
    to_steps = functools.partial(steps, epoch_end=epoch_end)
    lengths: dict[str, Any] = {}
    if "warmup" in chosen:
        lengths["warmup"] = to_steps(chosen["warmup"], field="schedule.warmup")
    if "at" in chosen:
        lengths["at"] = [to_steps(at, field="schedule.at") for at in chosen["at"]]
    return functools.partial(chosen.partial, **lengths)


def _group(group: Any, epoch_end: EpochEnd) -> dict[str, Any]:
    """Returns a group of parameters, with `from` as a step; `optimizers.build` checks it."""
    if not isinstance(group, dict) or "path" not in group:
        raise ValueError(f"optimizer.groups: write dict(path='^head/', ...), not {group!r}")
    check("optimizer.groups", group, _GROUP_FIELDS)
    start = group.get("from", 0)
    return group | {"from": steps(start, epoch_end=epoch_end, field="optimizer.groups.from")}
