"""Old names, which keep working for one version with a warning."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

__all__ = ["of", "renamed_keywords"]


def renamed_keywords(**new_names: str) -> Callable[[Callable], Callable]:
    """A decorator for a function that also takes old names of keywords: `old="new"`."""

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*args: Any, **keywords: Any) -> Any:
            for old, new in new_names.items():
                if old in keywords:
                    _warn(f"{function.__name__}({old}=...)", f"{new}=")
                    if new in keywords:
                        raise TypeError(f"{old} is the old name of {new}: give {new} alone")
                    keywords[new] = keywords.pop(old)
            return function(*args, **keywords)

        call.__renamed_keywords__ = MappingProxyType(new_names)  # type: ignore[attr-defined]
        return call

    return decorate


def of(function: Callable, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """`keywords` for `function`, with old names replaced by new ones. Says nothing about it."""
    new_names = getattr(function, "__renamed_keywords__", {})
    return {new_names.get(name, name): value for name, value in keywords.items()}


def _warn(old: str, new: str) -> None:
    message = f"{old} is an old name and works for one more version: write {new}"
    warnings.warn(message, FutureWarning, stacklevel=3)
