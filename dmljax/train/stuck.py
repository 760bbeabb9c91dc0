"""A warning for runs that learn nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["has_moved", "has_risen", "warning"]

_FEWEST_REPORTS = 9
_EARLIEST = 0.2  # the share of the steps before which nothing is said: rates may still warm up


def has_moved(losses: Sequence[float]) -> bool:
    """Whether the last third of the losses differs from the first third by more than their noise.

    It does if the difference of the means is more than twice its standard error, or more than a
    tenth of the first mean. Fewer than 9 losses are too few to tell: True.
    """
    if len(losses) < _FEWEST_REPORTS:
        return True
    count = len(losses) // 3
    first, last = (np.asarray(part, np.float64) for part in (losses[:count], losses[-count:]))
    difference = abs(first.mean() - last.mean())
    error = math.sqrt((first.var(ddof=1) + last.var(ddof=1)) / count)
    return bool(difference > 2 * error or difference > abs(first.mean()) / 10)


def has_risen(scores: Sequence[float], *, images: int) -> bool:
    """Whether a later score is above the first by more than twice its standard error.

    The error is that of a share of `images` images. Fewer than 2 scores are too few to tell: True.
    """
    if len(scores) < 2:
        return True
    first, best = scores[0], max(scores[1:])
    share = min(max((first + best) / 2, 0.0), 1.0)
    return best - first > 2 * math.sqrt(share * (1 - share) / max(images, 1))


def warning(rows: Sequence[Mapping[str, Any]], *, key: str, images: int, steps: int) -> str | None:
    """What to say about a run whose loss has not moved and whose score has not risen, or None.

    `rows` are the lines of `metrics.jsonl`, `key` names the score, such as 'val/R@1', of a split of
    `images` images, and `steps` is the length of the run.
    """
    losses = [row["loss"] for row in rows if "loss" in row]
    scores = {row["step"]: row[key] for row in rows if key in row and row["step"]}
    if not scores or max(scores) < _EARLIEST * steps:
        return None
    if has_moved(losses) or has_risen(list(scores.values()), images=images):
        return None
    count = len(losses) // 3
    first, last = min(scores), max(scores)
    return (
        f"warning: the loss has not moved (mean {np.mean(losses[:count]):.4g} at the start, "
        f"{np.mean(losses[-count:]):.4g} now), and {key} has not risen since step {first} "
        f"({100 * scores[first]:.1f}, now {100 * scores[last]:.1f}). Try another optimizer.rate; "
        "with proxies, a higher rate for them (optimizer.groups: path '^proxies', factor 10 to "
        "100); with a miner or a margin, an easier one; or another loss"
    )
