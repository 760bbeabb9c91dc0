"""One folder with everything that embeds an image: program, parameters, preprocessing, card.

`load(path)` is all that a user of a bundle needs; it imports neither flax nor the code of nets.
`dmljax export RUN --out=photos.bundle` writes one, and `dmljax bundle check` checks it.
docs/ship.md describes the files.
"""

import importlib

from dmljax.bundle.errors import BadBundle, BadImage

# Modules that are imported at first use: loading needs jax, exporting also the net.
_LAZY = {
    "Bundle": "loading",
    "export": "exporting",
    "load": "loading",
}

__all__ = ["BadBundle", "BadImage", *_LAZY]


def __getattr__(name: str):
    if name in _LAZY:
        return getattr(importlib.import_module(f"dmljax.bundle.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'dmljax.bundle' has no attribute {name!r}")
