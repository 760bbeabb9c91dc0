"""Deep metric learning in JAX.

Modules are imported at first use, so that `import dmljax` takes milliseconds and does not import
jax.
"""

import importlib

__version__ = "0.1.0"

_MODULES = (
    *("bundle", "data", "index", "losses", "methods", "metrics"),
    *("miners", "nets", "ops", "recipes", "report", "retrieval"),
)

__all__ = ["__version__", "load", *_MODULES]


def __getattr__(name: str):
    if name == "load":
        return importlib.import_module("dmljax.runs.folder").load
    if name in _MODULES:
        return importlib.import_module(f"dmljax.{name}")
    raise AttributeError(f"module 'dmljax' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
