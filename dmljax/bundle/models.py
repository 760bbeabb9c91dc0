"""The embedding of a run as a function of its parameters, and the programs made from it.

jax2onnx replaces functions of flax and jax.numpy while it runs, so it runs in its own process:

    python -m dmljax.bundle.models FOLDER
"""

import importlib.util
import os
import pathlib
import subprocess
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.interpreters import partial_eval

from dmljax.adapt.trees import path_of
from dmljax.bundle import files
from dmljax.files import reading

PLATFORMS = ("cpu", "cuda", "tpu")
# jax2onnx asks for an older Orbax than dmljax, which it does not need for a conversion.
INSTALL_ONNX = "pip install 'dmljax[onnx]' && pip install --no-deps jax2onnx==0.17.1"
_OPSET = 23


class Model(NamedTuple):
    """An embedding function: `embed_fn(tensors, inputs [b *input_shape]) -> float32 [b d]`.

    `tensors` are the parameters and statistics that it reads, by their paths. The inputs are
    `uint8 [b h w c]` images, or the `int32 [b length]` tokens of a text tower.
    """

    embed_fn: Callable[[Mapping[str, Any], Any], Any]
    tensors: dict[str, Any]
    input_shape: tuple[int, ...]
    dtype: Any = np.uint8


def flat(variables: Any) -> dict[str, Any]:
    """Returns the arrays of a tree by their paths, such as 'params/net/conv1/kernel'."""
    leaves = jax.tree_util.tree_leaves_with_path(variables)
    return {path_of(keys): x for keys, x in leaves}


def of_tensors(function: Callable[..., Any], variables: Any) -> Callable[..., Any]:
    """Returns `function(variables, inputs)` with the variables given as tensors by their paths."""
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
    """Returns the `Model` of `method_embed_fn(params, model_state, images)`.

    `variables` is `{"params": ..., "model_state": ...}` with arrays or `jax.ShapeDtypeStruct` as
    leaves. Tensors that the embedding does not read, such as classifiers, proxies and memories,
    are left out.
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

    return Model(embed, {path: arrays[path] for path in used_paths}, tuple(image_shape))


def model_of(config: dict[str, Any], image_shape: Sequence[int], *, classes: int) -> Model:
    """Returns the model of a completed config; its `tensors` are shapes. Reads no data set."""
    from dmljax.config.build import embedding  # the code of nets, which training needs too

    method, normalize_fn = embedding(config, classes=classes)

    def variables():
        images = normalize_fn(jnp.zeros((2, *image_shape), jnp.uint8))
        batch = {"images": images, "labels": np.zeros(2, np.int32)}
        params, model_state = method.init(jax.random.key(0), batch)
        return {"params": params, "model_state": model_state}

    return model(method.embed, normalize_fn, jax.eval_shape(variables), image_shape)


def open_model(folder: pathlib.Path) -> Model:
    """Returns the model of the bundle in `folder`: code from dmljax, values from the bundle."""
    manifest = files.read_manifest(folder)
    shape = [manifest.preprocess[name] for name in ("height", "width", "channels")]
    tensors = files.read_tensors(folder, manifest, files.PARAMS)
    return model_of(manifest.config, shape, classes=manifest.classes)._replace(tensors=tensors)


def at_size(
    config: dict[str, Any], variables: Any, image_shape: Sequence[int], *, classes: int
) -> tuple[dict[str, Any], Model]:
    """Returns config and model with learned positions resized for images of this shape.

    Then no program resizes them at every call. Models without learned positions stay as they are.
    """
    from dmljax.config.fields import options_of
    from dmljax.nets import positions

    net = options_of(config, ("net",)).net.function()
    height, width = image_shape[:2]
    new, variables = positions.at_size(net, variables, (height, width))
    if new is not net:
        image_size = np.array(new.image_size).tolist()  # as JSON has it
        config = {**config, "net": {**config["net"], "image_size": image_size}}
    shapes, arrays = model_of(config, image_shape, classes=classes), flat(variables)
    tensors = {path: np.ascontiguousarray(arrays[path]) for path in shapes.tensors}
    return config, shapes._replace(tensors=tensors)


def stablehlo(model: Model, *, platforms: Sequence[str] = PLATFORMS) -> export.Exported:
    """Returns the program for any batch size and for all `platforms`."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), model.tensors)
    (batch,) = export.symbolic_shape("b")
    inputs = jax.ShapeDtypeStruct((batch, *model.input_shape), model.dtype)
    option = "jax_hlo_source_file_canonicalization_regex"
    before = getattr(jax.config, option)
    # The folders of source files would tell who exported a bundle.
    jax.config.update(option, ".*/")
    try:
        return export.export(jax.jit(model.embed_fn), platforms=list(platforms))(shapes, inputs)
    finally:
        jax.config.update(option, before)


def check_onnx_installed() -> None:
    """Raises ImportError with the command that installs what is missing."""
    for package in ("jax2onnx", "onnx", "onnx_ir", "onnxruntime"):
        if importlib.util.find_spec(package) is None:
            raise ImportError(f"--onnx needs {package}: {INSTALL_ONNX}")


def write_onnx(folder: pathlib.Path) -> None:
    """Writes `embed.onnx` into the bundle in `folder`, in a new process."""
    root = str(pathlib.Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "dmljax.bundle.models", folder]
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        problem = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise ValueError(f"jax2onnx cannot convert this net ({problem}): export without --onnx")


def _write_onnx(folder: pathlib.Path) -> None:
    import jax2onnx

    from dmljax.nets.layers import impl

    # The process that wrote this folder has imported the modules of its config, or refused them.
    with reading.trusting_modules(True):
        model = open_model(folder)
    # jax cannot name a size in a shape.
    images = types.SimpleNamespace(shape=("B", *model.input_shape), dtype=np.dtype(model.dtype))
    with impl.portable():
        converted = jax2onnx.to_onnx(
            lambda images: model.embed_fn(model.tensors, images),
            [images],
            model_name="embed",
            opset=_OPSET,
            input_names=["images"],
            output_names=["embeddings"],
        )
    (folder / files.ONNX).write_bytes(converted.SerializeToString())


if __name__ == "__main__":
    _write_onnx(pathlib.Path(sys.argv[1]))
