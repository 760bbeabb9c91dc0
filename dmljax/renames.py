"""Old names, which keep working for one version with a warning."""

import functools
import sys
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

# Functions of version 0.1.0 by the kinds that `config.registry` gives them: {old name: new name}.
FUNCTIONS: Mapping[str, Mapping[str, str]] = {
    "metric": {
        "mean_average_precision": "average_precision",
        "mean_reciprocal_rank": "reciprocal_rank",
    },
    "sampler": {
        "combine": "class_chunks",
        "number": "random_class_count",
        "plan": "class_balanced",
    },
}


def old_functions(module: str, kind: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module whose functions of `kind` also have their old names."""

    def get(name: str) -> Any:
        if name not in FUNCTIONS[kind]:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        new_name = FUNCTIONS[kind][name]
        _warn(f"{module}.{name}", new_name)
        return getattr(sys.modules[module], new_name)

    return get


def current(kind: str, name: Any) -> Any:
    """The name of a function of `kind` for the name in a config. Warns if that one is old."""
    new_name = FUNCTIONS.get(kind, {}).get(name, name)
    if new_name != name:
        _warn(f"the {kind} {name!r} of the config", repr(new_name))
    return new_name


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


def dropped_keywords(*names: str) -> Callable[[Callable], Callable]:
    """A decorator for a function that still accepts old keywords, and ignores them."""

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*args: Any, **keywords: Any) -> Any:
            for name in names:
                if name in keywords:
                    del keywords[name]
                    warn(
                        f"{function.__name__}({name}=...) is ignored, and an error after one more "
                        "version: leave it out"
                    )
            return function(*args, **keywords)

        return call

    return decorate


def of(function: Callable, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """`keywords` for `function`, with old names replaced by new ones. Says nothing about it."""
    new_names = getattr(function, "__renamed_keywords__", {})
    return {new_names.get(name, name): value for name, value in keywords.items()}


def warn(message: str) -> None:
    """Warns, at the line that called the function which calls this one, of an old way to write."""
    warnings.warn(message, FutureWarning, stacklevel=3)


def _warn(old: str, new: str) -> None:
    message = f"{old} is an old name and works for one more version: write {new}"
    warnings.warn(message, FutureWarning, stacklevel=3)
