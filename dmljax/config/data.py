"""Builds the data of a run: splits, held-out classes, and the sampler; counts its steps."""

import functools
import inspect
import re
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np

from dmljax.data import batches, digest, sampling
from dmljax.data.features import transforms_of
from dmljax.data.records import Reader
from dmljax.data.sampling import sampler as samplers
from dmljax.data.splits import (
    Split,
    divide,
    fold_of_classes,
    images_of,
    queries_and_gallery,
    share,
)
from dmljax.data.transforms.transform import Transform, bind
from dmljax.hints import check_all, counted
from dmljax.train.options import Cached, Fold, Length, Options, Spec

# epochs -> the step after which that many epochs of the sampler have ended
EpochEnd = Callable[[float], float]


class Data(NamedTuple):
    """Splits, and the digest of the whole data set; `Run` has fields of the same names."""

    data_digest: str
    train: Split
    held_out: Split | None
    test: Split


def data_of(
    options: Options, split_fn: Callable[..., Split] | None = None
) -> tuple[Data, np.ndarray]:
    """Returns the data set with the classes held out that `held_out` asks for.

    Also returns the labels by which the sampler counts its epochs: of `train` or, with
    `dataset.full_epochs`, of all images that it is a fraction of. `split_fn(split,
    is_training=...)` first replaces the records of both splits.
    """
    splits, spec = options.dataset.function(), options.dataset
    for title, images, others in (("training", *splits), ("test", *splits[::-1])):
        if not len(images):
            raise ValueError(
                f"{spec['name']}: there are no {title} images, and "
                f"{counted(len(others.names), 'class')} in the other split. Training and test need "
                "different classes: add images of another class, a folder train/ or test/, or "
                f"choose another --config.dataset.split than {spec.get('split')}"
            )
    if reason := splits.test.missing_positives():
        raise ValueError(f"{spec['name']}: there is nothing to score in the test split: {reason}")
    train, test = splits
    if split_fn is not None:
        train, test = split_fn(train, is_training=True), split_fn(test)
    train, held_out = _divided(options, train)
    has_two_sides = test.query is not None and not (test.query & test.gallery).any()
    if held_out is not None and has_two_sides and held_out.query is None:
        held_out = queries_and_gallery(held_out)
    epoch_labels = train.labels
    if {"image_fraction", "class_fraction"} & set(spec):
        fractions = spec.get("image_fraction", 1.0), spec.get("class_fraction", 1.0)
        train = share(train, images=fractions[0], classes=fractions[1], seed=options.seed)
    labels = epoch_labels if spec.get("full_epochs") else train.labels
    return Data(digest.digest(splits), train, held_out, test), labels


def _divided(options: Options, train: Split) -> tuple[Split, Split | None]:
    """Returns the classes that are trained on, and the classes that are held out."""
    held_out, count = options.held_out, len(train.names)
    if held_out is None:
        return train, None
    if isinstance(held_out, Fold):
        index, folds, seed = held_out.index, held_out.count, held_out.seed
        is_held_out = fold_of_classes(count, fold=index, folds=folds, seed=seed)
        return divide(train, train=np.asarray(train.names)[~is_held_out].tolist())
    # One held-out class alone would score 1 whatever the net does.
    remaining = min(round((1 - held_out.fraction) * count), count - 2)
    if remaining < 2:
        raise ValueError(
            f"held_out={held_out.fraction} of {counted(count, 'training class')}: two classes are "
            "needed to hold out, and two to train on: hold fewer out (--config.held_out=0.2), add "
            "classes, or hold none out (--config.held_out=None --config.select=last)"
        )
    return divide(train, train=train.names[:remaining])


def inputs_of(options: Options, train: Split, normalization: Spec) -> dict[str, Any]:
    """Returns how images are prepared, and their shapes, as fields of `Run` by their names.

    Cached features are prepared as images.
    """
    reader, skip = Reader(images_of(train), cache=False), options.unreadable == "skip"
    transforms = transform_of(options.transform), transform_of(options.eval_transform)
    shapes = [batches.image_shape(reader, fn, skip=skip) for fn in transforms]
    normalize_fn: Callable = normalization.function
    if isinstance(options.features, Cached):
        transforms = transforms_of(*transforms, options.features.views)
        normalize_fn = functools.partial(_normalized_images, normalize_fn)
    return {
        **dict(zip(("transform_fn", "eval_transform_fn"), transforms, strict=True)),
        **dict(zip(("image_shape", "eval_image_shape"), shapes, strict=True)),
        "normalize_fn": normalize_fn,
    }


def _normalized_images(normalize_fn: Callable, x: Any) -> Any:
    """Returns normalized images, and features as they are."""
    return x if x.ndim == 2 else normalize_fn(x)


def transform_of(chosen: Spec) -> Transform:
    """Returns a transform with the arguments of the config."""
    return bind(chosen.partial.func, **chosen.partial.keywords)


def timing_of(
    options: Options, labels: np.ndarray, epoch_labels: np.ndarray
) -> tuple[dict[str, Any], EpochEnd]:
    """Returns the sampler with the steps at which things happen, and the ends of its epochs.

    The first are fields of `Run` by their names. `labels` are of the training images; the sampler
    counts its epochs by `epoch_labels`.
    """
    spec, groups = options.sampler, sampling.group(labels)
    sampler = samplers.bind(spec.partial.func, **spec.partial.keywords)
    epoch_end = samplers.epoch_end_fn(sampler, epoch_labels, seed=options.seed)
    total = steps(options.steps, epoch_end=epoch_end, field="steps")
    at = functools.partial(every, epoch_end=epoch_end)
    # Without an interval, once after the last step; a run may have no step.
    interval = max(total, 1) if options.evaluate.every is None else options.evaluate.every
    evaluation_steps = at(interval, total=total, field="evaluate.every")
    # By default, a run that is killed loses no more than a fifth of its steps.
    intervals = (options.checkpoint.every, options.evaluate.every, max(-(-total // 5), 1))
    saves = next(x for x in intervals if x is not None)
    note = ""
    neighbor_steps: Collection[int] = ()
    if (classes := spec.get("classes", 0)) > (count := len(groups.count)):
        note = f"a batch has all {count} classes instead of {classes}"
    uses_neighbors = "neighbors" in inspect.signature(spec.partial.func).parameters
    if uses_neighbors:
        search = spec.get("every", "1 epoch")
        neighbor_steps = at(search, total=total - 1, field="sampler.every")
        if not neighbor_steps:
            note = "the run ends before the nearest classes are searched (sampler.every)"
    to_steps = functools.partial(steps, epoch_end=epoch_end, field="reload_best_at")
    reloads = tuple(map(to_steps, options.reload_best_at))
    first = min(evaluation_steps, default=total)
    reload = min(reloads, default=first)
    problems = {
        f"sampler.every: {spec['name']} does not use neighboring classes: leave it out": (
            "every" in spec and not uses_neighbors
        ),
        f"reload_best_at: {reload} is before the first evaluation, at {first}": reload < first,
    }
    check_all(problems)
    timing = {
        "steps": total,
        "batch_size": len(sampler(groups, seed=options.seed, step=0)),
        "evaluation_steps": evaluation_steps,
        "checkpoint_steps": at(saves, total=total, field="checkpoint.every"),
        "neighbor_steps": neighbor_steps,
        "reload_steps": reloads,
        "sample_fn": sampler.batch,
        "sampler_note": note,
    }
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
