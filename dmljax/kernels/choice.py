"""The one place where `impl` becomes a function. `dmljax.kernels` documents its values."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax

__all__ = ["IMPLS", "check", "choose", "describe"]

IMPLS = ("auto", "cpu", "xla")


def choose(impl: str, *, cpu_fn: Callable, xla_fn: Callable) -> Callable:
    """The form that `impl` names. For "auto", JAX chooses when it compiles for a platform."""
    check(impl)
    if impl == "auto":
        return functools.partial(jax.lax.platform_dependent, cpu=cpu_fn, default=xla_fn)
    return cpu_fn if impl == "cpu" else xla_fn


def describe(impl: str, platform: str) -> str:
    """One phrase for the header of a run: who computes convolutions and max pooling.

    >>> describe("auto", "cpu")
    "convolutions by dmljax.kernels (impl='auto')"
    """
    check(impl)
    author = "dmljax.kernels" if impl == "cpu" or (impl, platform) == ("auto", "cpu") else "XLA"
    return f"convolutions by {author} (impl={impl!r})"


def check(impl: str) -> None:
    """Raises unless `impl` is one of `IMPLS`."""
    if impl not in IMPLS:
        raise ValueError(f"impl must be one of {', '.join(map(repr, IMPLS))}, not {impl!r}")
