"""The data set of a config, and the classes that are held out of training."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from dmljax.data import digest as digests
from dmljax.data.splits import (
    Split,
    Splits,
    divide,
    fold_of_classes,
    queries_and_gallery,
    share,
)
from dmljax.hints import counted
from dmljax.train.options import Fold, Options


class Data(NamedTuple):
    """The splits of a run, and the digest of the whole data set."""

    data_digest: str
    train: Split
    held_out: Split | None
    test: Split


def data_of(options: Options, split_fn: Callable[..., Split] | None = None) -> Data:
    """Returns the data set with the classes held out that `held_out` asks for.

    `split_fn(split, is_training=...)` replaces the records of both splits before that.
    """
    splits = options.dataset.function()
    _check_images(options, splits)
    if split_fn is not None:
        splits = Splits(split_fn(splits.train, is_training=True), split_fn(splits.test))
    train, held_out = _divided(options, splits.train)
    if held_out is not None and _has_two_sides(splits.test) and held_out.query is None:
        held_out = queries_and_gallery(held_out)
    train = _share(options, train)
    return Data(digests.digest(splits), train, held_out, splits.test)


def _check_images(options: Options, splits: Splits) -> None:
    """Raises if a split has no image, or if no query of the test split can find one."""
    name, split = options.dataset["name"], options.dataset.get("split")
    for title, images, other, others in (
        ("training", splits.train, "test", splits.test),
        ("test", splits.test, "training", splits.train),
    ):
        if len(images):
            continue
        count, reason = len(others.names), ""
        advice = f"add them, in a folder {title.removesuffix('ing')}/ for a data set of folders"
        if count == 1 and others.query is None:
            reason = f", because {others.names[0]!r} is the only class"
            advice = "training and test need different classes, so add a folder of another one"
        elif split is not None:
            reason = f", because split={split} puts all {count} classes into the {other} split"
            advice = "choose another one, such as --config.dataset.split=0.5"
        raise ValueError(f"{name}: there are no {title} images{reason}: {advice}")
    if reason := splits.test.missing_positives():
        raise ValueError(f"{name}: there is nothing to score in the test split: {reason}")


def epoch_labels(options: Options, train: Split) -> np.ndarray:
    """Returns the labels by which the sampler counts its epochs: of `train`, or of all images.

    With `full_epochs`, runs on fractions of the images have the same number of steps.
    """
    if not options.dataset.get("full_epochs"):
        return train.labels
    full_train, _ = _divided(options, options.dataset.function().train)
    return full_train.labels


def _divided(options: Options, train: Split) -> tuple[Split, Split | None]:
    """Returns the classes that are trained on, and the classes that are held out."""
    held_out = options.held_out
    if held_out is None:
        return train, None
    if isinstance(held_out, Fold):
        is_held_out = fold_of_classes(
            len(train.names), fold=held_out.index, folds=held_out.count, seed=held_out.seed
        )
        names = [n for n, held in zip(train.names, is_held_out, strict=True) if not held]
        return divide(train, train=names)
    classes = _train_classes(held_out.fraction, len(train.names))
    return divide(train, train=train.names[:classes])


def _train_classes(fraction: float, count: int) -> int:
    """Returns how many of `count` classes are left for training."""
    # One held-out class alone would score 1 whatever the net does.
    train_classes = min(round((1 - fraction) * count), count - 2)
    if train_classes < 2:
        advice = "hold fewer out, such as --config.held_out=0.2"
        if count < 4:
            advice = "add classes, or --config.held_out=None --config.select=last"
        raise ValueError(
            f"held_out={fraction} of {counted(count, 'training class')}: two classes are needed to "
            f"hold out, and two to train on: {advice}"
        )
    return train_classes


def _has_two_sides(split: Split) -> bool:
    """Tells whether no image of a split is both a query and in the gallery."""
    return split.query is not None and not (split.query & split.gallery).any()


def _share(options: Options, train: Split) -> Split:
    """Returns the part of the training split that `image_fraction` and `class_fraction` ask for."""
    spec = options.dataset
    if not {"image_fraction", "class_fraction"} & set(spec):
        return train
    return share(
        train,
        images=spec.get("image_fraction", 1.0),
        classes=spec.get("class_fraction", 1.0),
        seed=options.seed,
    )
