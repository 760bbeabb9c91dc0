"""One line for an argument that is not one of a recipe's choices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["check_choice"]


def check_choice(name: str, value: Any, choices: Iterable[Any]) -> None:
    """Raises unless `value` is one of `choices`."""
    choices = list(choices)
    if value not in choices:
        listed = ", ".join(map(str, choices[:-1])) + f" or {choices[-1]}"
        raise ValueError(f"{name} is {listed if len(choices) > 1 else choices[0]}, not {value!r}")
