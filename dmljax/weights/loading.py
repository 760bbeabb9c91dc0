"""Variables of a net from a published or a converted file."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from flax import traverse_util

from dmljax.weights import readers
from dmljax.weights.converted import digest, metadata_of
from dmljax.weights.layouts import (
    CLASSIFIERS,
    FLAX,
    Layout,
    architecture,
    layout_of,
    torch_tensors,
)
from dmljax.weights.published import PUBLISHED

__all__ = ["IMAGE_SIZE", "Variables", "fit", "from_tensors", "load", "read_published"]

ReportFn = Callable[[str], None]
Variables = dict[str, Any]
IMAGE_SIZE = 224  # of all published files


def load(
    path: str | os.PathLike,
    net: nn.Module,
    *,
    image_shape: Sequence[int] | None = None,
    report_fn: ReportFn = logging.info,
) -> Variables:
    """The variables of `net`, as numpy arrays, from a published or a converted file.

    Every tensor is checked. A classifier that the net lacks is left out, and so are the stages
    before `start` and after `stop`. `report_fn` is called with a line about what is left out, and
    about types other than float32. Any other tensor that is missing, unknown or of another shape
    raises; one error lists all of them. `image_shape` is the shape of the net's images, by default
    224 x 224 x 3.
    """
    weights = read_published(path)
    if "dmljax" not in weights.metadata:
        return fit(str(path), torch_tensors(weights), net, layout_of(net), report_fn, image_shape)
    metadata = metadata_of(path, weights)
    if metadata["tensors_sha256"] != digest(weights.tensors):
        raise ValueError(f"{path} is damaged (its digest is another): convert it again")
    label = f"{path}, converted for {metadata['net']['name']},"
    return fit(label, weights.tensors, net, FLAX, report_fn, image_shape)


def from_tensors(
    label: str,
    tensors: Mapping[str, np.ndarray],
    net: nn.Module,
    *,
    image_shape: Sequence[int] | None = None,
    report_fn: ReportFn = logging.info,
) -> Variables:
    """The variables of `net` from arrays named 'params/conv1/kernel', checked as by `load`.

    Messages call them `label`.
    """
    return fit(label, tensors, net, FLAX, report_fn, image_shape)


def read_published(path: str | os.PathLike) -> readers.Weights:
    """`readers.read`, which also compares the SHA-256 with the digits in the file's name."""
    if str(path) in PUBLISHED and not pathlib.Path(path).exists():
        raise FileNotFoundError(
            f"{path} is not a file but the name of a published one: "
            f"dmljax weights --fetch={path} downloads it and prints its path"
        )
    weights = readers.read(path)
    digits = re.search(r"-([0-9a-f]{8,64})\.pth?$", pathlib.Path(path).name)
    if digits and not weights.sha256.startswith(digits[1]):
        raise ValueError(
            f"{path} is damaged or another file: by its name the SHA-256 begins with "
            f"{digits[1]}, but it is {weights.sha256[:16]}...: download it again"
        )
    return weights


def fit(
    label: str,
    tensors: Mapping[str, np.ndarray],
    net: nn.Module,
    layout: Layout,
    report_fn: ReportFn,
    image_shape: Sequence[int] | None = None,
) -> Variables:
    """The variables of `net` from the tensors of a file, which messages call `label`."""
    shapes_of_all_stages, shapes = _shapes(net, image_shape)
    paths = {layout.name_fn(path): path for path in shapes}
    tops = {layout.top_fn(name) for name in paths}
    classifiers = [n for n in tensors if n not in paths and layout.top_fn(n) in CLASSIFIERS - tops]
    other_stage_names = {layout.name_fn(path) for path in shapes_of_all_stages} - set(paths)
    other_stages = [n for n in tensors if n in other_stage_names]
    unknown = [n for n in tensors if n not in {*paths, *classifiers, *other_stages}]
    missing = [n for n in paths if n not in tensors]
    wrong_shapes, wrong_types, arrays, hint = [], [], {}, ""
    for name, path in paths.items():
        if name not in tensors:
            continue
        shape = layout.shape_fn(shapes[path].shape)
        array = _without_leading_ones(tensors[name], len(shape))
        if array.shape != shape:
            wrong_shapes.append(f"{name} {_text(array.shape)}, in the net {_text(shape)}")
            if layout.top_fn(name) in CLASSIFIERS:
                hint = ". A net with classes=None has no classifier"
        elif not jnp.issubdtype(array.dtype, jnp.floating):
            wrong_types.append(f"{name} of {array.dtype}")
        else:
            arrays[path] = array
    problems = {
        "missing": missing,
        "not in the net": unknown,
        "shape": wrong_shapes,
        "no floats": wrong_types,
    }
    if wrong := "; ".join(f"{title}: {_some(names)}" for title, names in problems.items() if names):
        guess = _guess(tensors) if len(missing) >= len(paths) / 2 else ""
        raise ValueError(f"{label} does not fit the net{guess}. {wrong}{hint}")
    for title, names in (("classifiers", classifiers), ("other stages", other_stages)):
        if names:
            report_fn(f"{label}: {title} left out, as the net has none: {_some(names)}")
    for dtype in sorted({array.dtype.name for array in arrays.values()} - {"float32"}):
        count = sum(array.dtype.name == dtype for array in arrays.values())
        verb = "rounded" if dtype == "float64" else "widened"
        report_fn(f"{label}: {count} of {len(arrays)} tensors are {dtype}, {verb} to float32")
    variables = {
        path: _converted(layout.value_fn(arrays[path]), shapes[path].dtype) for path in shapes
    }
    if broken := [name for name, path in paths.items() if not np.isfinite(variables[path]).all()]:
        raise ValueError(f"{label} is damaged: NaN or infinity in {_some(broken)}")
    return traverse_util.unflatten_dict(variables)


def _shapes(
    net: nn.Module, image_shape: Sequence[int] | None
) -> tuple[dict[tuple, Any], dict[tuple, Any]]:
    """Shapes of variables by path: of all stages, and of the stages from `start` to `stop`."""
    defaults: dict[str, Any] = {
        f.name: f.default for f in dataclasses.fields(net) if f.name in ("start", "stop")
    }
    stages: dict[str, Any] = {}

    def variables_of(net, image):
        def init(key, x):
            outputs, variables = net.init_with_output(key, x, train=False)
            stages.update(outputs)
            return variables

        return traverse_util.flatten_dict(jax.eval_shape(init, jax.random.key(0), image))

    size = getattr(net, "image_size", IMAGE_SIZE)
    image = jax.ShapeDtypeStruct((1, *(image_shape or (size, size, 3))), jnp.float32)
    of_all_stages = variables_of(net.clone(**defaults), image)
    if all(getattr(net, name) == default for name, default in defaults.items()):
        return of_all_stages, of_all_stages
    order, start = list(stages), getattr(net, "start", None)
    if start != defaults["start"] and start in order:
        stage_before = stages[order[order.index(start) - 1]]
        image = jax.ShapeDtypeStruct(stage_before.shape, jnp.float32)
    return of_all_stages, variables_of(net, image)


def _without_leading_ones(array: np.ndarray, ndim: int) -> np.ndarray:
    """Caffe's blobs, and old conversions of them, have leading axes of size 1."""
    extra = array.ndim - ndim
    if extra > 0 and array.size and set(array.shape[:extra]) == {1}:
        return array.reshape(array.shape[extra:])
    return array


def _converted(array: np.ndarray, dtype: Any) -> np.ndarray:
    with np.errstate(over="ignore"):  # `fit` reports infinities by name
        return np.array(array, dtype, order="C")


def _guess(tensors: Mapping[str, Any]) -> str:
    words = architecture(tensors)
    return f": it looks like {words}" if words else ": it is of another architecture"


def _some(items: Iterable[str]) -> str:
    items, limit = list(items), 12
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more


def _text(shape: Iterable[int]) -> str:
    return f"[{' '.join(map(str, shape))}]"
