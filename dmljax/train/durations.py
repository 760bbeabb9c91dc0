"""Lengths of time in a config, such as 500 or '60 epochs', as numbers of steps."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, runtime_checkable

__all__ = ["Epochs", "every", "steps"]


@runtime_checkable
class Epochs(Protocol):
    """Converts epochs of a sampler to steps."""

    def steps(self, epochs: float) -> int:
        """The step after which so many epochs have ended, at least 1."""
        ...

    def every(self, epochs: float, *, total: int) -> Collection[int]:
        """The steps up to `total` after which 1, 2, 3, ... times so many epochs have ended."""
        ...


def steps(length: int | str, *, epochs: Epochs) -> int:
    """The number of steps of a length: 500, '500 steps' or '60 epochs'."""
    count, unit = _parse(length)
    if unit == "epochs":
        return epochs.steps(count)
    return max(1, round(count)) if isinstance(length, str) else round(count)


def every(length: int | str, *, epochs: Epochs, total: int) -> Collection[int]:
    """The steps up to `total` at which something happens that is asked for once in `length`."""
    count, unit = _parse(length)
    if unit == "epochs":
        return epochs.every(count, total=total)
    period = max(1, steps(length, epochs=epochs))
    return range(period, total + 1, period)


def _parse(length: int | str) -> tuple[float, str]:
    """(60.0, 'epochs') of '60 epochs'."""
    message = f"{length!r} is no duration: write 500, or '60 epochs'"
    if isinstance(length, str):
        number, _, unit = length.partition(" ")
        units = {"steps": "steps", "step": "steps", "epochs": "epochs", "epoch": "epochs"}
        try:
            count, unit = float(number), units[unit]
        except (ValueError, KeyError):
            raise ValueError(message) from None
    else:
        if isinstance(length, bool) or int(length) != length:
            raise ValueError(message)
        count, unit = float(length), "steps"
    if not 0 <= count < float("inf"):
        raise ValueError(message)
    return count, unit
