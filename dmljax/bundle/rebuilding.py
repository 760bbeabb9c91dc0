"""The embedding function of a bundle, built again from its config and its parameters.

JAX promises for some months that a program loads; config and parameters last longer. Needs the
code of the net, as training does.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dmljax.bundle import files, programs
from dmljax.config.build import embedding

__all__ = ["model_of", "open_model"]


def open_model(folder: pathlib.Path, manifest: Mapping[str, Any]) -> programs.Model:
    """The model of the bundle in `folder`: its code from dmljax, its values from the bundle."""
    config = files.read_json(folder, manifest, files.CONFIG)
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
