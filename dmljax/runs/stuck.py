"""Warnings about runs that learn nothing."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_FEWEST_REPORTS = 9
# Fractions of the steps before the warnings: first the learning rate may still rise.
_EARLIEST, _EARLIEST_FOR_PIXELS = 0.2, 0.5
_FEWEST_DIMENSIONS = 8  # A well-trained net of fewer dimensions can still score below raw pixels.
# Above this R@1 of raw pixels, the warning needs a net with less than half of their R@1.
_EASY = 0.9


def has_moved(losses: Sequence[float]) -> bool:
    """Returns whether the last third of the losses differs from the first by more than noise.

    The means must differ by more than twice the standard error of the difference, or by a tenth of
    the first mean. Fewer than 9 losses count as moved.
    """
    if len(losses) < _FEWEST_REPORTS:
        return True
    count = len(losses) // 3
    first, last = (np.asarray(part, np.float64) for part in (losses[:count], losses[-count:]))
    difference = abs(first.mean() - last.mean())
    error = math.sqrt((first.var(ddof=1) + last.var(ddof=1)) / count)
    return bool(difference > 2 * error or difference > abs(first.mean()) / 10)


def has_risen(scores: Sequence[float], *, images: int) -> bool:
    """Returns whether a later score exceeds the first by more than twice its standard error.

    A score is a fraction of `images` images, so the error is binomial. A single score counts as
    risen.
    """
    if len(scores) < 2:
        return True
    return max(scores[1:]) - scores[0] > _noise(scores[0], max(scores[1:]), images)


def _noise(first: float, second: float, images: int) -> float:
    """Returns twice the standard error of the mean of two fractions of `images` images."""
    fraction = min(max((first + second) / 2, 0.0), 1.0)
    return 2 * math.sqrt(fraction * (1 - fraction) / max(images, 1))


def below_pixels(
    rows: Sequence[Mapping[str, Any]], *, dim: int, images: int, steps: int
) -> str | None:
    """Returns a warning if a run is no better than raw pixels after half of its steps, or None.

    The loss of such a run may fall nevertheless, above all with proxies of very many classes.
    `rows` are the lines of `metrics.jsonl`, `images` is the size of the test split, `dim` is the
    width of the embeddings, and `steps` is the length of the run.
    """
    pixels = next((row["raw/R@1"] for row in rows if "raw/R@1" in row), None)
    scores = {row["step"]: row["test/R@1"] for row in rows if "test/R@1" in row and row["step"]}
    is_late = max(scores, default=-1) >= _EARLIEST_FOR_PIXELS * steps
    if pixels is None or not is_late or dim < _FEWEST_DIMENSIONS:
        return None
    best = max(scores.values())
    if best > (pixels / 2 if pixels >= _EASY else pixels + _noise(pixels, best, images)):
        return None
    return (
        f"warning: after {max(scores):,} of {steps:,} steps the best test/R@1 is {100 * best:.1f}, "
        f"and R@1 of raw pixels is {100 * pixels:.1f}: the net has learned little that helps on "
        "these classes. With very many classes, a loss against proxies needs one image of each "
        "class in a batch, 30 times the net's rate for '^proxies', and more steps; a loss of pairs "
        'such as multi_similarity needs less. See docs/choosing.md, "Which loss for how many '
        'classes"'
    )


def warning(rows: Sequence[Mapping[str, Any]], *, key: str, images: int, steps: int) -> str | None:
    """Returns a warning if neither the loss nor the score of a run has changed, or None.

    `key` names the score, such as 'val/R@1'; `below_pixels` explains the other arguments.
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
