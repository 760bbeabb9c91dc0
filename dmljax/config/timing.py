"""When things happen in a run: lengths and intervals in steps, the sampler, the learning rate."""

import functools
import inspect
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import optax

from dmljax import adapt
from dmljax.config import annotations
from dmljax.config.resolve import EXTRAS
from dmljax.data import sampling
from dmljax.data.sampling import sampler as samplers
from dmljax.data.splits import Split
from dmljax.train import optimizers
from dmljax.train.options import Length, Options, Spec

_MOST_STEPS = 100_000_000  # of a run; the epochs of more would take minutes to count
# epochs -> the step after which that many epochs of the sampler have ended
EpochEnd = Callable[[float], float]
_UNITS = {"steps": "steps", "step": "steps", "epochs": "epochs", "epoch": "epochs"}
_GROUP_FIELDS = {
    "path": "str",
    "factor": "float",
    "decay": "float | None",
    "l2": "float | None",
    "frozen": "bool",
    "from": "int | str",  # a step, or '1 epoch'
}


class Timing(NamedTuple):
    """The sampler of a run, and its lengths and intervals in steps, under the names of `Run`."""

    steps: int
    batch_size: int
    evaluation_steps: Collection[int]
    checkpoint_steps: Collection[int]
    neighbor_steps: Collection[int]
    reload_steps: tuple[int, ...]
    sample_fn: Callable
    sampler_note: str


def timing_of(options: Options, train: Split, epoch_labels: Any) -> tuple[Timing, EpochEnd]:
    """Returns the sampler with the steps at which things happen, and the ends of its epochs.

    The sampler counts its epochs by `epoch_labels`, which are `train.labels` or of a larger split.
    """
    chosen = options.sampler.partial
    sampler = samplers.bind(chosen.func, **chosen.keywords)
    groups = sampling.group(train.labels)
    batch_size = len(sampler(groups, seed=options.seed, step=0))
    epoch_end = samplers.epoch_end_fn(sampler, epoch_labels, seed=options.seed)
    total = steps(options.steps, epoch_end=epoch_end, field="steps")
    if total > _MOST_STEPS:
        raise ValueError(f"steps={options.steps!r}: a run has at most {_MOST_STEPS:,} steps")
    at = functools.partial(every, epoch_end=epoch_end, total=total)
    # Without an interval, once after the last step; a run may have no step.
    interval = max(total, 1) if options.evaluate.every is None else options.evaluate.every
    evaluation_steps = at(interval, field="evaluate.every")
    # By default, a run that is killed loses no more than a fifth of its steps.
    intervals = (options.checkpoint.every, options.evaluate.every, max(-(-total // 5), 1))
    saves = next(x for x in intervals if x is not None)
    note, neighbor_steps = sampler.describe(groups), _neighbor_steps(options, total, epoch_end)
    if neighbor_steps is not None and not neighbor_steps:
        note = "the run ends before the nearest classes are searched (sampler.every)"
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
        neighbor_steps or (),
        reloads,
        sampler.batch,
        note,
    )
    return timing, epoch_end


def _neighbor_steps(options: Options, total: int, epoch_end: EpochEnd) -> Collection[int] | None:
    """Returns when neighboring classes are searched; None if the sampler does not use them."""
    takes_neighbors = "neighbors" in inspect.signature(options.sampler.partial.func).parameters
    if not takes_neighbors:
        if "every" in options.sampler:
            raise ValueError(
                f"sampler.every: {options.sampler['name']} does not use neighboring classes: "
                "leave it out"
            )
        return None
    interval = options.sampler.get("every", "1 epoch")
    return every(interval, epoch_end=epoch_end, total=total - 1, field="sampler.every")


def steps(length: Length, *, epoch_end: EpochEnd, field: str = "length") -> int:
    """Returns the number of steps of a length: 500, '500 steps' or '60 epochs'.

    `field` is the field of the config that holds the length, for error messages.
    """
    count, unit = _parse(length, field)
    if unit == "epochs":
        count = epoch_end(count)
    return max(1, round(count)) if isinstance(length, str) else round(count)


def every(
    length: Length, *, epoch_end: EpochEnd, total: int, field: str = "length"
) -> Collection[int]:
    """Returns the steps up to `total` at which something happens that is due once per `length`.

    If `length` is a whole number of epochs, these are the steps at which epochs of the sampler end;
    epochs may differ in length. Any other `length` is a fixed number of steps.
    """
    count, unit = _parse(length, field)
    if not count:
        raise ValueError(f"{field}={length!r} is not an interval: write steps, or '1 epoch'")
    if unit == "steps" or count < 1 or count != int(count):
        period = max(1, steps(length, epoch_end=epoch_end, field=field))
        return range(period, total + 1, period)
    ends: list[int] = []
    while not ends or ends[-1] < total:
        ends.append(max(1, round(epoch_end(count * (len(ends) + 1)))))
    return frozenset(end for end in ends if end <= total)


def _parse(length: Length, field: str) -> tuple[float, str]:
    """Returns (60.0, 'epochs') for '60 epochs'."""
    try:
        if isinstance(length, str):
            number, _, unit = length.partition(" ")
            count, unit = float(number), _UNITS[unit]
        else:
            count, unit = float(length), "steps"
            if isinstance(length, bool) or count != int(count):
                raise ValueError
        if not 0 <= count < float("inf"):
            raise ValueError
    except (ValueError, KeyError, OverflowError):
        raise ValueError(
            f"{field}={length!r} is not a duration: write 500, or '60 epochs'"
        ) from None
    return count, unit


def optimizer_of(
    options: Options,
    timing: Timing,
    epoch_end: EpochEnd,
    *,
    frozen: Collection[str],
    backbone: Sequence[str],
) -> optax.GradientTransformation:
    """Returns the optimizer; parameters at the paths `frozen` do not learn, whatever groups say.

    `layer_decay` applies to the parameters in the folders `backbone`.
    """
    chosen = options.optimizer
    keywords = {k: chosen[k] for k in EXTRAS["optimizer"] if k in chosen}
    paths = "|".join(map(re.escape, sorted(frozen)))
    frozen_groups = [{"path": f"^({paths})$", "frozen": True}] if frozen else []
    groups = (_group(group, epoch_end) for group in keywords.get("groups", ()))
    keywords["groups"] = [*frozen_groups, *groups]
    if keywords.get("average") and timing.reload_steps:
        raise ValueError(
            "optimizer.average and reload_best_at exclude each other (the average would keep "
            "parameters from before the reload): leave out one of them"
        )
    schedule = _schedule(options.schedule, epoch_end)(total=timing.steps)
    return optimizers.build(chosen.function(), schedule=schedule, backbone=backbone, **keywords)


def _schedule(chosen: Spec, epoch_end: EpochEnd) -> Callable[..., Any]:
    lengths: dict[str, int | list[int]] = {}
    if "warmup" in chosen:
        lengths["warmup"] = steps(chosen["warmup"], epoch_end=epoch_end, field="schedule.warmup")
    if "at" in chosen:
        to_steps = functools.partial(steps, epoch_end=epoch_end, field="schedule.at")
        lengths["at"] = [to_steps(at) for at in chosen["at"]]
    return functools.partial(chosen.partial, **lengths)


def _group(group: Any, epoch_end: EpochEnd) -> dict[str, Any]:
    """Returns a group of parameters, with `from` as a step."""
    if not isinstance(group, dict):
        raise ValueError(f"optimizer.groups: write dict(path='^head/', ...), not {group!r}")
    annotations.check("optimizer.groups", group, _GROUP_FIELDS)
    if "from" not in group:
        return group
    start = steps(group["from"], epoch_end=epoch_end, field="optimizer.groups.from")
    return group | {"from": start}


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
