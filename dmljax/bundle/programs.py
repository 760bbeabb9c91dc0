"""The embedding of a run as a program: its parameters are arguments, its batch is of any size.

JAX promises for some months that a program loads. Config and parameters last longer: `open_model`
makes the embedding function of a bundle from them again.
"""

import contextlib
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.interpreters import partial_eval

from dmljax.bundle import admission, files
from dmljax.config import fields

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


def of_tensors(function: Callable[..., Any], variables: Any) -> Callable[..., Any]:
    """`function(variables, inputs)`, taking instead of the variables its tensors by their paths."""
    structure, paths = jax.tree.structure(variables), list(flat(variables))

    def of_flat(tensors, inputs):
        return function(jax.tree.unflatten(structure, [tensors[path] for path in paths]), inputs)

    return of_flat


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

    def embed_nested(variables, images):
        return method_embed_fn(variables["params"], variables["model_state"], normalize_fn(images))

    arrays, embed_all = flat(variables), of_tensors(embed_nested, variables)
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


def open_model(folder: pathlib.Path, manifest: Mapping[str, Any]) -> Model:
    """The model of the bundle in `folder`: its code from dmljax, its values from the bundle."""
    config = files.read_json(folder, manifest, files.CONFIG)
    sizes = files.read_json(folder, manifest, files.PREPROCESS)["input"]
    shape = tuple(sizes[name] for name in ("height", "width", "channels"))
    tensors = files.read_tensors(folder, manifest, files.PARAMS)
    shapes = model_of(config, shape, classes=manifest["classes"])
    files.check_tensors(tensors, shapes.tensors, name=files.PARAMS)
    return shapes._replace(tensors=tensors)


def model_of(config: dict[str, Any], image_shape: Sequence[int], *, classes: int) -> Model:
    """The model of a completed config; its `tensors` are shapes. Reads no data set."""
    from dmljax.config.build import embedding  # the code of nets, which training needs too

    method, normalize_fn = embedding(config, classes=classes)

    def variables():
        images = normalize_fn(jax.numpy.zeros((2, *image_shape), jax.numpy.uint8))
        batch = {"images": images, "labels": np.zeros(2, np.int32)}
        params, model_state = method.init(jax.random.key(0), batch)
        return {"params": params, "model_state": model_state}

    return model(method.embed, normalize_fn, jax.eval_shape(variables), image_shape)


def at_size(
    config: dict[str, Any], variables: Any, image_shape: Sequence[int]
) -> tuple[dict[str, Any], Any]:
    """Config and variables of a model whose net has learned positions for images of this shape.

    So no program resizes them. Models of other nets stay as they are.
    """
    from dmljax.config.resolve import resolve
    from dmljax.nets import positions

    net = resolve(config, ("net",)).net.function()
    height, width = image_shape[:2]
    new, variables = positions.at_size(net, variables, (height, width))
    if new is net:
        return config, variables
    image_size = np.array(new.image_size).tolist()  # as JSON has it
    return {**config, "net": {**fields.named(config["net"]), "image_size": image_size}}, variables


def with_values(model: Model, variables: Any) -> Model:
    """The model of `model_of`, whose tensors are shapes, with its arrays among `variables`."""
    arrays = flat(variables)
    return model._replace(tensors={path: arrays[path] for path in model.tensors})


def stablehlo(model: Model, *, platforms: Sequence[str] = PLATFORMS) -> export.Exported:
    """The program for any batch size and for all `platforms`."""
    shape = model.image_shape
    return exported(model.embed_fn, model.tensors, shape, np.uint8, platforms=platforms)


def exported(
    embed_fn: Callable[..., Any],
    tensors: Mapping[str, Any],
    input_shape: Sequence[int],
    dtype: Any,
    *,
    platforms: Sequence[str] = PLATFORMS,
) -> export.Exported:
    """`embed_fn(tensors, inputs [b *input_shape])` for any batch size."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tensors)
    (batch,) = export.symbolic_shape("b")
    inputs = jax.ShapeDtypeStruct((batch, *input_shape), dtype)
    with _without_folders():
        return export.export(jax.jit(embed_fn), platforms=list(platforms))(shapes, inputs)


@contextlib.contextmanager
def _without_folders() -> Iterator[None]:
    """A program names the source of each operation: here by the names of files alone.

    Their folders would tell who exported a bundle, and change its digest.
    """
    name = "jax_hlo_source_file_canonicalization_regex"
    before = getattr(jax.config, name)
    jax.config.update(name, ".*/")
    try:
        yield
    finally:
        jax.config.update(name, before)


def serialized(exported: export.Exported) -> bytes:
    """The bytes of a program's file."""
    try:
        return bytes(exported.serialize())
    except ImportError as error:
        raise ImportError(
            "writing a program needs flatbuffers: pip install 'dmljax[export]'"
        ) from error


def write(path: pathlib.Path, exported: export.Exported) -> None:
    """Writes the file of a program of this process, which is read without a trial."""
    data = serialized(exported)
    admission.accept(data)
    path.write_bytes(data)
