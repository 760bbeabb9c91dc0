"""The embedding of a run as a program: its parameters are arguments, its batch is of any size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.interpreters import partial_eval

__all__ = ["PLATFORMS", "Model", "flat", "model", "serialized", "stablehlo"]

PLATFORMS = ("cpu", "cuda", "tpu")


class Model(NamedTuple):
    """An embedding function: `embed_fn(tensors, images uint8 [b h w c]) -> float32 [b d]`.

    `tensors` are the parameters and statistics that it reads, by their paths.
    """

    embed_fn: Callable[[Mapping[str, Any], Any], Any]
    tensors: dict[str, Any]
    image_shape: tuple[int, int, int]


def flat(variables: Any) -> dict[str, Any]:
    """The arrays of a tree by their paths, such as 'params/net/conv1/kernel'."""
    leaves = jax.tree_util.tree_leaves_with_path(variables)
    return {jax.tree_util.keystr(keys, simple=True, separator="/"): x for keys, x in leaves}


def model(
    method_embed_fn: Callable[..., Any],
    normalize_fn: Callable[[Any], Any],
    variables: Mapping[str, Any],
    image_shape: Sequence[int],
) -> Model:
    """The `Model` of `method_embed_fn(params, model_state, images)`, without unused parameters.

    `variables` is `{"params": ..., "model_state": ...}` with arrays or `jax.ShapeDtypeStruct` as
    leaves. Classifiers, proxies and memories of the training are left out of `tensors`.
    """
    arrays = flat(variables)
    structure = jax.tree.structure(variables)

    def embed_all(tensors, images):
        nested = jax.tree.unflatten(structure, [tensors[path] for path in arrays])
        return method_embed_fn(nested["params"], nested["model_state"], normalize_fn(images))

    shapes = {path: jax.ShapeDtypeStruct(x.shape, x.dtype) for path, x in arrays.items()}
    images = jax.ShapeDtypeStruct((2, *image_shape), jnp.uint8)
    traced = jax.make_jaxpr(embed_all)(shapes, images).jaxpr
    _, used = partial_eval.dce_jaxpr(traced, [True] * len(traced.outvars))
    # JAX sorts the keys of dicts.
    used_paths = [path for path, is_used in zip(sorted(shapes), used[:-1], strict=True) if is_used]
    unused = {path: shapes[path] for path in shapes if path not in used_paths}

    def embed(tensors, images):
        # A Flax module reads its unused parameters too; the compiler drops these zeros.
        zeros = {path: jnp.zeros(x.shape, x.dtype) for path, x in unused.items()}
        return embed_all({**tensors, **zeros}, images)

    used_arrays = {path: arrays[path] for path in used_paths}
    return Model(embed, used_arrays, tuple(image_shape))


def stablehlo(model: Model, *, platforms: Sequence[str] = PLATFORMS) -> export.Exported:
    """The program for any batch size and for all `platforms`."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), model.tensors)
    (batch,) = export.symbolic_shape("b")
    images = jax.ShapeDtypeStruct((batch, *model.image_shape), np.uint8)
    return export.export(jax.jit(model.embed_fn), platforms=list(platforms))(shapes, images)


def serialized(exported: export.Exported) -> bytes:
    """The bytes of a program's file."""
    try:
        return bytes(exported.serialize())
    except ImportError as error:
        raise ImportError(
            "writing a program needs flatbuffers: pip install dmljax[export]"
        ) from error
