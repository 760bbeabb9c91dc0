"""Deep metric learning in JAX.

Rooms are imported when first touched, so ``import dmljax`` is quick and does not import jax.
"""

import importlib

__version__ = "0.1.0"

_ROOMS = ("config", "data", "losses", "methods", "metrics", "miners", "nets", "ops", "retrieval")

__all__ = ["__version__", "load", *_ROOMS]


def __getattr__(name: str):
    if name == "load":
        return importlib.import_module("dmljax.trained").load
    if name in _ROOMS:
        return importlib.import_module(f"dmljax.{name}")
    raise AttributeError(f"module 'dmljax' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
