"""A bundle of a published backbone as it is: its pooled features as unit vectors, no training."""

import dataclasses
import importlib.util
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from dmljax import at_hand
from dmljax.bundle import card, exporting, files, loading, models, preprocessing, text
from dmljax.config import fields
from dmljax.config.registry import chosen
from dmljax.files.writing import atomic_folder
from dmljax.hints import hint
from dmljax.methods.assemble import with_backbone
from dmljax.nets.clip import token_rule
from dmljax.weights import PUBLISHED, load
from dmljax.weights.loading import load_text
from dmljax.weights.published import get_command, vocabulary_beside

_EXAMPLES = ("a photo of a cat", "red shoe", "")


def export(
    name: str,
    weights: str | os.PathLike | None,
    out: str | os.PathLike,
    *,
    onnx: bool = False,
    batch_sizes: Sequence[int] = exporting.BATCH_SIZES,
    license: str | None = None,
    vocabulary: str | os.PathLike | None = None,
) -> pathlib.Path:
    """Writes the bundle `out` of the net `name` of `weights.PUBLISHED`, and returns its path.

    `weights` is the file; None takes a file that is on this machine. Every program is compared with
    the net on the golden images; if one differs, `MismatchedProgram` is raised and nothing is left.
    A file that also has the tower for text of CLIP or SigLIP 2 makes a bundle that embeds text too,
    given a `vocabulary`, by default the one that `weights.fetch` put next to the file, or
    tokenizer.json next to it.
    """
    out, path = pathlib.Path(out), weights_of(name, weights)
    exporting.check_target(out, batch_sizes, onnx=onnx)
    with atomic_folder(out) as folder:
        config, preprocess, model, embed_fn = _model(name, path)
        facts: dict[str, Any] = {"batch_sizes": batch_sizes, "classes": 1, "onnx": onnx}
        manifest = exporting.write(folder, model, config, preprocess, embed_fn, **facts)
        rule = _write_text(folder, name, path, vocabulary)
        manifest = dataclasses.replace(manifest, text=rule)
        markdown = card.of_backbone(name, manifest, license=license)
        (folder / files.CARD).write_text(markdown)
        files.write_manifest(folder, manifest)
    return out


def _write_text(
    folder: pathlib.Path,
    name: str,
    weights: pathlib.Path,
    vocabulary: str | os.PathLike | None,
) -> files.TokenRule | None:
    """Writes the files for text, and returns the rule for tokens; None without text."""
    beside = [vocabulary_beside(weights), weights.with_name(files.VOCABULARY)]
    path = next(filter(pathlib.Path.is_file, beside), None)
    if vocabulary is not None:
        path = pathlib.Path(vocabulary)
    elif path is not None and importlib.util.find_spec("tokenizers") is None:
        logging.warning("the bundle embeds no words: they need pip install 'dmljax[text]'")
        return None  # the user did not ask for words
    text_tower = None if path is None else load_text(weights, PUBLISHED[name].net)
    if path is None or text_tower is None:
        if vocabulary is None:
            return None
        raise ValueError(
            f"--vocabulary={vocabulary}: {weights} does not contain the tower for text of {name}: "
            "leave it out"
        )
    tower, variables = text_tower
    rule = files.TokenRule(**token_rule(PUBLISHED[name].net)._asdict())
    tokens_fn = text.Tokens(path.read_bytes(), rule)
    if tokens_fn.size > tower.vocabulary:
        raise ValueError(
            f"the vocabulary has {tokens_fn.size:,} tokens, and the tower for text knows "
            f"{tower.vocabulary:,}: it belongs to another net"
        )

    def embed(variables, tokens):
        vectors = tower.apply(variables, tokens)
        norms = jnp.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors / jnp.maximum(norms, 1e-12)

    tensors = {name: np.ascontiguousarray(x) for name, x in models.flat(variables).items()}
    embed_fn = models.of_tensors(embed, variables)
    model = models.Model(embed_fn, tensors, (tower.length,), np.int32)
    examples = tokens_fn(_EXAMPLES)
    embeddings = np.asarray(jax.jit(embed_fn)(tensors, examples))
    golden = {"tokens": examples, "embeddings": embeddings}
    names = (files.TEXT_PARAMS, files.TEXT_PROGRAM, files.TEXT_GOLDEN)
    exporting.write_program(folder, model, golden, names)
    (folder / files.VOCABULARY).write_bytes(path.read_bytes())
    return rule


def weights_of(name: str, path: str | os.PathLike | None) -> pathlib.Path:
    """Returns the file of the weights of `name`: `path`, or one that is on this machine."""
    if name not in PUBLISHED:
        raise ValueError(f"--net: there is no {name!r} in `dmljax weights`{hint(name, PUBLISHED)}")
    path = path or at_hand.weights_at_hand().get(name)
    if path is None or not pathlib.Path(path).is_file():
        reason = "" if path is None else f" ({path} is not a file)"
        raise FileNotFoundError(
            f"the weights of {name} are not here{reason}: {get_command(name)}, or --weights=FILE"
        )
    return pathlib.Path(path)


def opened(name: str, weights: pathlib.Path) -> loading.Bundle:
    """Returns the bundle that `export` would write, without files: the net is its program."""
    config, preprocess, model, embed_fn = _model(name, weights)
    images = jax.ShapeDtypeStruct((1, *preprocess.shape), np.uint8)
    dimension = jax.eval_shape(model.embed_fn, model.tensors, images).shape[1]
    embeddings = np.eye(1, dimension, dtype=np.float32)  # any unit vector
    facts: dict[str, Any] = {"batch_sizes": exporting.BATCH_SIZES, "classes": 1}
    manifest = exporting.describe(model.tensors, config, preprocess, embeddings, **facts)
    folder = pathlib.Path(name)  # for messages
    return loading.Bundle(folder, manifest, preprocess, embed_fn, manifest.batch_sizes)


def _model(
    name: str, weights: pathlib.Path
) -> tuple[
    dict[str, Any],
    preprocessing.Preprocessing,
    models.Model,
    Callable[[np.ndarray], np.ndarray],
]:
    """Returns config, preprocessing and model of a bundle, and the net itself as a function."""
    published = PUBLISHED[name]
    config = fields.complete(
        {
            "dataset": "none",
            "net": {"name": published.net},
            "method": {"name": "pairs", "dim": None},
            "loss": "supcon",
            "steps": 0,
            "eval_transform": published.preprocessing.transform,
            "normalize": published.preprocessing.normalize,
        }
    )
    size = published.preprocessing.size
    shape = (size, size, 3)
    backbone = load(weights, chosen("net", published.net).function(), image_shape=shape)
    params, model_state = with_backbone({}, {}, backbone)
    variables = {"params": params, "model_state": model_state}
    net, arrays = models.model_of(config, shape, classes=1), models.flat(variables)
    on_device = jax.device_put({path: arrays[path] for path in net.tensors})
    jitted = jax.jit(net.embed_fn)

    def embed_fn(images: np.ndarray) -> np.ndarray:
        return np.asarray(jitted(on_device, images), np.float32)

    config, model = models.at_size(config, variables, shape, classes=1)
    preprocess = preprocessing.from_transform(config["eval_transform"], shape)
    return config, preprocess, model, embed_fn
