"""Small facts for the tests of the page, with a different picture for every item."""

import numpy as np

from dmljax.data.splits import Split
from dmljax.report import facts

HOSTILE = "</script><img src=x onerror=alert(1)>"


def colored(item: int) -> np.ndarray:
    """Makes an image of one color that encodes the item; `number_of` decodes it."""
    color = [40 + 25 * (item % 8), 40 + 25 * (item // 8 % 8), 40 + 25 * (item // 64 % 8)]
    return np.full((24, 24, 3), color, np.uint8)


def number_of(color) -> int:
    """Returns the item whose picture has the nearest color."""
    digits = [round((float(value) - 40) / 25) for value in color[:3]]
    return digits[0] + 8 * digits[1] + 64 * digits[2]


def clustered(items=96, classes=12, dimension=8, spread=0.7, seed=0):
    """Returns embeddings, unit vectors around one mean for each class, and labels."""
    rng = np.random.default_rng(seed)
    labels = np.arange(items) % classes
    x = rng.normal(size=(classes, dimension))[labels] + spread * rng.normal(size=(items, dimension))
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32), labels


def names_of(classes=12):
    """Returns class names, including some that try to break the page."""
    names = [f"class {c}" for c in range(classes)]
    hostile = [HOSTILE, "x" * 300, "שלום עולם", "漢字のクラス", "a & b <b>bold</b>", "‮reversed"]
    for c, name in zip(range(1, classes), hostile, strict=False):
        names[c] = name
    return names


def made(
    *, items=96, classes=12, dimension=8, title="arrays", names=None, marks=None, **options
) -> facts.Facts:
    """Makes facts of `clustered` with pictures; `options` are those of `facts.make`.

    `marks` are queries, gallery and groups.
    """
    embeddings, labels = clustered(items, classes, dimension)
    split = Split(np.arange(items), labels, tuple(names or names_of(classes)), **(marks or {}))
    return facts.make(embeddings, split, title=title, **{"read_fn": colored} | options)
