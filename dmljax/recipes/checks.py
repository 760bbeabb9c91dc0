"""What recipes share: a check of their arguments, and the values in which data sets differ."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["check_choice", "with_values"]


def check_choice(name: str, value: Any, choices: Iterable[Any]) -> None:
    """Raises unless `value` is one of `choices`."""
    choices = list(choices)
    if value not in choices:
        listed = ", ".join(map(str, choices[:-1])) + f" or {choices[-1]}"
        raise ValueError(f"{name} is {listed if len(choices) > 1 else choices[0]}, not {value!r}")


def with_values(config: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The config, itself changed by values of fields such as 'optimizer.groups.0.factor'."""
    for field, value in values.items():
        *sections, name = field.split(".")
        section: Any = config
        for parent in sections:
            section = section[int(parent) if isinstance(section, list) else parent]
        section[name] = copy.deepcopy(value)
    return config
