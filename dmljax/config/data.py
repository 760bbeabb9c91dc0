"""The data set of a config, and the classes that are held out of training."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from dmljax.data import digest as digests
from dmljax.data.splits import Split, Splits, divide, fold_of_classes, queries_and_gallery, share
from dmljax.hints import counted
from dmljax.train.options import Fold, Options


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
    _check_images(options, splits)
    if split_fn is not None:
        splits = Splits(split_fn(splits.train, is_training=True), split_fn(splits.test))
    train, held_out = _divided(options, splits.train)
    test = splits.test
    has_two_sides = test.query is not None and not (test.query & test.gallery).any()
    if held_out is not None and has_two_sides and held_out.query is None:
        held_out = queries_and_gallery(held_out)
    full_train = train
    if {"image_fraction", "class_fraction"} & set(spec):
        fractions = spec.get("image_fraction", 1.0), spec.get("class_fraction", 1.0)
        train = share(train, images=fractions[0], classes=fractions[1], seed=options.seed)
    counted_split = full_train if spec.get("full_epochs") else train
    return Data(digests.digest(splits), train, held_out, test), counted_split.labels


def _check_images(options: Options, splits: Splits) -> None:
    """Raises if a split has no image, or if no query of the test split can find one."""
    name = options.dataset["name"]
    for title, images, others in (
        ("training", splits.train, splits.test),
        ("test", splits.test, splits.train),
    ):
        if not len(images):
            raise ValueError(
                f"{name}: there are no {title} images, and {counted(len(others.names), 'class')} "
                "in the other split. Training and test need different classes: add images of "
                "another class, a folder train/ or test/, or choose another "
                f"--config.dataset.split than {options.dataset.get('split')}"
            )
    if reason := splits.test.missing_positives():
        raise ValueError(f"{name}: there is nothing to score in the test split: {reason}")


def _divided(options: Options, train: Split) -> tuple[Split, Split | None]:
    """Returns the classes that are trained on, and the classes that are held out."""
    held_out, count = options.held_out, len(train.names)
    if held_out is None:
        return train, None
    if isinstance(held_out, Fold):
        is_held_out = fold_of_classes(
            count, fold=held_out.index, folds=held_out.count, seed=held_out.seed
        )
        return divide(
            train, train=[n for n, x in zip(train.names, is_held_out, strict=True) if not x]
        )
    # One held-out class alone would score 1 whatever the net does.
    remaining = min(round((1 - held_out.fraction) * count), count - 2)
    if remaining < 2:
        raise ValueError(
            f"held_out={held_out.fraction} of {counted(count, 'training class')}: two classes are "
            "needed to hold out, and two to train on: hold fewer out (--config.held_out=0.2), add "
            "classes, or hold none out (--config.held_out=None --config.select=last)"
        )
    return divide(train, train=train.names[:remaining])
