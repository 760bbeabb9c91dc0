"""When a run ends before its last step."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["is_out_of_patience"]


def is_out_of_patience(scores: Sequence[float], patience: int | None) -> bool:
    """Whether the best of `scores`, one per evaluation, is more than `patience` evaluations old.

    Of equal scores the earliest is the best. None is endless patience.

    >>> is_out_of_patience([0.1, 0.5, 0.4], 1), is_out_of_patience([0.1, 0.5, 0.4, 0.5], 1)
    (False, True)
    """
    if patience is None or not scores:
        return False
    best = max(range(len(scores)), key=lambda i: (scores[i], -i))
    return len(scores) - 1 - best > patience
