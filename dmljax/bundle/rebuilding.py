"""The embedding function of a bundle, made anew from its config and its parameters.

JAX promises for some months that a program loads; config and parameters last longer. Needs the
code of the net, as training does.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dmljax.bundle import files, programs
from dmljax.bundle.errors import BadBundle
from dmljax.config.build import embedding

__all__ = ["model_of", "open_model"]

_OWN_MODULES = ("losses", "methods", "miners", "nets", "ops")


def open_model(
    folder: pathlib.Path, manifest: Mapping[str, Any], *, trust_modules: bool = False
) -> programs.Model:
    """The model of the bundle in `folder`: its code from dmljax, its values from the bundle.

    A config may name functions of other modules, whose import runs their code: it is refused unless
    `trust_modules`.
    """
    config = files.read_json(folder, manifest, files.CONFIG)
    if not trust_modules and (foreign := list(_foreign(config))):
        raise BadBundle(
            f"config.json of {folder} names {foreign[0]!r}, and importing it runs its code: if you "
            "trust this bundle, add --trust-modules"
        )
    sizes = files.read_json(folder, manifest, files.PREPROCESS)["input"]
    shape = tuple(sizes[name] for name in ("height", "width", "channels"))
    tensors = files.read_tensors(folder, manifest, files.PARAMS)
    model = model_of(config, shape, classes=manifest["classes"])
    files.check_tensors(tensors, model.tensors, name=files.PARAMS)
    return model._replace(tensors=tensors)


def model_of(config: dict[str, Any], image_shape: Sequence[int], *, classes: int) -> programs.Model:
    """The model of a completed config; its `tensors` are shapes. Reads no data set."""
    method, normalize_fn = embedding(config, classes=classes)

    def variables():
        images = normalize_fn(jax.numpy.zeros((2, *image_shape), jax.numpy.uint8))
        batch = {"images": images, "labels": np.zeros(2, np.int32)}
        params, model_state = method.init(jax.random.key(0), batch)
        return {"params": params, "model_state": model_state}

    return programs.model(method.embed, normalize_fn, jax.eval_shape(variables), image_shape)


def _foreign(config: Any) -> Iterator[str]:
    """Names such as 'my_module:MyNet' of modules outside of dmljax's losses, nets and so on."""
    if isinstance(config, Mapping):
        for name, value in config.items():
            if name not in ("dataset", "notes"):
                yield from _foreign(value)
    elif isinstance(config, list):
        for value in config:
            yield from _foreign(value)
    elif isinstance(config, str) and ":" in config:
        package, _, module = config.partition(":")[0].partition(".")
        if package != "dmljax" or module.partition(".")[0] not in _OWN_MODULES:
            yield config
