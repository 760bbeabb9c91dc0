"""Two finished runs on the same test images: a paired bootstrap over classes."""

from __future__ import annotations

import pathlib
from typing import NamedTuple

import numpy as np
import safetensors
from safetensors.numpy import load_file

from dmljax import metrics
from dmljax.hints import hint

__all__ = ["Compared", "compare", "text"]

FILE = "scores.safetensors"
COLUMNS = {"R@1": "recall_at_1", "RP": "r_precision", "MAP@R": "map_at_r"}
SAMPLES, LEVEL = 10_000, 0.95
_FEWEST_CLASSES = 20


class Compared(NamedTuple):
    """Two runs in shares: the means over queries, and the interval of their difference."""

    a: float
    b: float
    low: float
    high: float
    p: float
    queries: int
    classes: int


def compare(a: pathlib.Path, b: pathlib.Path, *, score: str = "R@1") -> Compared:
    """The difference between two runs in a score of their queries, resampled by classes.

    Per query, the difference of the scores of both runs; then `metrics.interval` over classes. It
    is an interval for these two trained nets on other classes of this kind.
    """
    if score not in COLUMNS:
        raise ValueError(f"compare has no score {score!r}{hint(score, COLUMNS)}")
    (of_a, marks_a), (of_b, marks_b) = _read(a), _read(b)
    for mark, (x, y) in _pairs(marks_a, marks_b).items():
        if x != y:
            raise ValueError(
                f"{a} and {b} are not of the same queries: {mark} is {_short(x)} and {_short(y)}"
            )
    labels = of_a["labels"]
    if not np.array_equal(labels, of_b["labels"]):
        raise ValueError(f"{a} and {b} are not of the same queries: their labels differ")
    x, y = (columns[COLUMNS[score]].astype(np.float64) for columns in (of_a, of_b))
    classes = len(np.unique(labels[np.isfinite(x - y)]))
    if classes < _FEWEST_CLASSES:
        raise ValueError(
            f"{a} has {classes} test classes: a bootstrap over classes needs {_FEWEST_CLASSES}; "
            "compare several seeds by a study instead"
        )
    means = metrics.bootstrap_means(x - y, groups=labels, samples=SAMPLES)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    p = min(1.0, 2 * min(float((means <= 0).mean()), float((means >= 0).mean())))
    return Compared(
        float(np.nanmean(x)), float(np.nanmean(y)), float(low), float(high), p, len(x), classes
    )


def _read(folder: pathlib.Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    path = folder / FILE
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no {FILE}: a run writes it when it is finished")
    try:
        with safetensors.safe_open(path, "numpy") as file:
            marks = file.metadata() or {}
        return load_file(path), marks
    except safetensors.SafetensorError as error:
        raise ValueError(
            f"{path} is damaged ({error}): run the command of the run again"
        ) from error


def _pairs(a: dict[str, str], b: dict[str, str]) -> dict[str, tuple[str | None, str | None]]:
    """What identifies the queries, in both files."""
    names = sorted(name for name in {*a, *b} if name == "split" or "data" in name or "item" in name)
    return {name: (a.get(name), b.get(name)) for name in names}


def _short(text: str | None) -> str:
    return "not recorded" if text is None else text[:12]


def text(a: pathlib.Path, b: pathlib.Path, *, score: str = "R@1") -> str:
    """The comparison for a reader, in percent."""
    c = compare(a, b, score=score)
    low, high, difference = 100 * c.low, 100 * c.high, 100 * (c.a - c.b)
    p = "< 0.001" if c.p < 0.001 else f"{c.p:.3f}"
    resolved = "" if low > 0 or high < 0 else ": not resolved"
    return "\n".join(
        [
            f"{score}: {100 * c.a:.1f} ({a}), {100 * c.b:.1f} ({b})",
            f"difference {difference:+.2f} [{low:+.2f}, {high:+.2f}], p {p}{resolved}",
            f"Paired bootstrap over {c.classes:,} classes with {c.queries:,} queries, "
            f"{SAMPLES:,} draws, {100 * LEVEL:.0f} % interval.",
            "It holds for these two trained nets on other classes. The spread over training seeds "
            "is not in it: methods are compared by several runs of each (dmljax study run).",
        ]
    )
