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
from safetensors.numpy import save as save_tensors

from dmljax import at_hand
from dmljax.bundle import card, exporting, files, loading, models, preprocessing, text
from dmljax.config import fields
from dmljax.config.registry import chosen
from dmljax.hints import hint
from dmljax.methods.assemble import with_backbone
from dmljax.weights import PUBLISHED, get_command, load
from dmljax.weights import text as weights_text

_MAX_VOCABULARY = 64 << 20  # bytes
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
    with exporting.written_whole(out) as folder:
        config, preprocess, model, embed_fn = _model(name, path)
        facts = {"batch_sizes": batch_sizes, "classes": 1}
        manifest = exporting.write_model(folder, model, config, preprocess, embed_fn, **facts)
        if (rule := _write_text(folder, name, path, vocabulary)) is not None:
            manifest = dataclasses.replace(manifest, text=rule)
            manifest = files.write_manifest(folder, manifest)
        inputs = files.read_tensors(folder, manifest, files.GOLDEN)["inputs"]
        manifest = exporting.write_proof(folder, manifest, preprocess, embed_fn, inputs, onnx=onnx)
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
    if vocabulary is not None and not pathlib.Path(vocabulary).is_file():
        raise FileNotFoundError(f"--vocabulary: {vocabulary} is not a file")
    if vocabulary is not None:
        path = pathlib.Path(vocabulary)
    elif (path := weights_text.vocabulary_beside(weights)).is_file():
        if importlib.util.find_spec("tokenizers") is None:  # the user did not ask for words
            logging.warning("the bundle embeds no words: they need pip install 'dmljax[text]'")
            return None
    elif not (path := weights.with_name(files.VOCABULARY)).is_file():
        return None
    tower_and_variables = weights_text.load(weights, PUBLISHED[name].net)
    if tower_and_variables is None:
        if vocabulary is None:
            return None
        raise ValueError(
            f"--vocabulary={vocabulary}: {weights} does not contain the tower for text of {name}: "
            "leave it out"
        )
    rule = files.TokenRule(**weights_text.token_rule(PUBLISHED[name].net)._asdict())
    _write_tower(folder, *tower_and_variables, rule, path.read_bytes())
    return rule


def _write_tower(
    folder: pathlib.Path, tower: Any, variables: Any, rule: files.TokenRule, vocabulary: bytes
) -> None:
    """Writes parameters, program, examples and vocabulary of a tower for text."""
    size = text.Tokens(vocabulary, rule).size
    if len(vocabulary) > _MAX_VOCABULARY or size > tower.vocabulary:
        raise ValueError(
            f"the vocabulary has {len(vocabulary):,} bytes and {size:,} tokens, and the tower for "
            f"text knows {tower.vocabulary:,}: it belongs to another net"
        )

    def embed(variables, tokens):
        vectors = tower.apply(variables, tokens)
        norms = jnp.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors / jnp.maximum(norms, 1e-12)

    tensors, embed_fn = models.flat(variables), models.of_tensors(embed, variables)
    exported = models.exported(embed_fn, tensors, (tower.length,), np.int32)
    examples = text.Tokens(vocabulary, rule)(_EXAMPLES)
    golden = {
        "tokens": examples,
        "embeddings": np.asarray(jax.jit(embed_fn)(tensors, examples)),
    }
    arrays = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
    (folder / files.TEXT_PARAMS).write_bytes(save_tensors(arrays))
    (folder / files.TEXT_PROGRAM).write_bytes(models.serialized(exported))
    (folder / files.VOCABULARY).write_bytes(vocabulary)
    (folder / files.TEXT_GOLDEN).write_bytes(save_tensors(golden))


def weights_of(name: str, path: str | os.PathLike | None) -> pathlib.Path:
    """Returns the file of the weights of `name`: `path`, or one that is on this machine."""
    if name not in PUBLISHED:
        raise ValueError(f"--net: there is no {name!r} in `dmljax weights`{hint(name, PUBLISHED)}")
    if path is None and (path := at_hand.weights_at_hand().get(name)) is None:
        raise FileNotFoundError(
            f"the weights of {name} are not here: {get_command(name)}, or --weights=FILE"
        )
    if not pathlib.Path(path).is_file():
        raise FileNotFoundError(f"--weights: {path} is not a file")
    return pathlib.Path(path)


def opened(name: str, weights: pathlib.Path) -> loading.Bundle:
    """Returns the bundle that `export` would write, without files: the net is its program."""
    config, preprocess, model, embed_fn = _model(name, weights)
    images = jax.ShapeDtypeStruct((1, *preprocess.shape), np.uint8)
    dimension = jax.eval_shape(model.embed_fn, model.tensors, images).shape[1]
    embeddings = np.eye(1, dimension, dtype=np.float32)  # any unit vector
    manifest = exporting.describe(
        model.tensors,
        config,
        preprocess,
        embeddings,
        batch_sizes=exporting.BATCH_SIZES,
        classes=1,
    )
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
    net = models.with_values(models.model_of(config, shape, classes=1), variables)
    on_device, jitted = jax.device_put(net.tensors), jax.jit(net.embed_fn)

    def embed_fn(images: np.ndarray) -> np.ndarray:
        return np.asarray(jitted(on_device, images), np.float32)

    config, variables = models.at_size(config, variables, shape)
    model = models.with_values(models.model_of(config, shape, classes=1), variables)
    preprocess = preprocessing.from_transform(config["eval_transform"], shape)
    return config, preprocess, model, embed_fn
