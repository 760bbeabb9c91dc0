"""A bundle of a published backbone as it is: its pooled features as unit vectors, no training."""

import importlib.util
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging

from dmljax import at_hand
from dmljax.bundle import (
    card,
    exporting,
    files,
    loading,
    preprocessing,
    programs,
    text,
)
from dmljax.config import fields
from dmljax.config.resolve import chosen
from dmljax.files.writing import write_json
from dmljax.hints import hint
from dmljax.methods.assemble import with_backbone
from dmljax.weights import PUBLISHED, get_command, load
from dmljax.weights import text as weights_text


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
    if `vocabulary` is there, by default the one that `weights.fetch` put beside the file, or
    tokenizer.json beside it.
    """
    out, path = pathlib.Path(out), weights_of(name, weights)
    sizes = exporting.checked_sizes(batch_sizes)
    exporting.check_target(out, onnx=onnx)
    with exporting.written_whole(out) as folder:
        config, preprocess, model, embed_fn = _model(name, path)
        write_json(folder / files.CONFIG, config, indent=2)
        exporting.write_model(folder, model, preprocess, embed_fn)
        facts = _facts(sizes) | _write_text(folder, name, path, vocabulary)
        manifest = exporting.write_manifest(folder, model, facts, onnx=onnx)
        inputs = files.read_tensors(folder, manifest, files.GOLDEN)["inputs"]
        net = loading.Bundle(folder, manifest, preprocess, embed_fn, sizes[-1:])
        reference = net.embed_prepared(inputs)
        reports = exporting.check_programs(folder, manifest, reference, inputs)
        write_json(folder / files.PARITY, reports, indent=2)
        steps = files.read_json(folder, manifest, files.PREPROCESS)
        markdown = card.of_backbone(name, manifest, reports, steps, license=license)
        (folder / files.CARD).write_text(markdown)
        exporting.write_manifest(folder, model, facts)
    return out


def _write_text(
    folder: pathlib.Path,
    name: str,
    weights: pathlib.Path,
    vocabulary: str | os.PathLike | None,
) -> dict[str, Any]:
    """Writes the files for text; returns their part of the manifest, nothing without text."""
    if vocabulary is not None and not pathlib.Path(vocabulary).is_file():
        raise FileNotFoundError(f"--vocabulary: there is no file {vocabulary}")
    if vocabulary is not None:
        path = pathlib.Path(vocabulary)
    elif (path := weights_text.vocabulary_beside(weights)).is_file():
        if importlib.util.find_spec("tokenizers") is None:  # the user did not ask for words
            logging.warning("the bundle embeds no words: they need pip install 'dmljax[text]'")
            return {}
    elif not (path := weights.with_name(files.VOCABULARY)).is_file():
        return {}
    tower_and_variables = weights_text.load(weights, PUBLISHED[name].net)
    if tower_and_variables is None:
        if vocabulary is None:
            return {}
        raise ValueError(
            f"--vocabulary={vocabulary}: {weights} has no tower for text of CLIP or SigLIP 2 that "
            f"belongs to {name}: leave it out"
        )
    rule = weights_text.token_rule(PUBLISHED[name].net)._asdict()
    text.write(folder, *tower_and_variables, rule, path.read_bytes())
    return {"text": rule}


def weights_of(name: str, path: str | os.PathLike | None) -> pathlib.Path:
    """The file of the weights of `name`: `path`, or one that is on this machine."""
    if name not in PUBLISHED:
        raise ValueError(f"--net: there is no {name!r} in `dmljax weights`{hint(name, PUBLISHED)}")
    if path is None and (path := at_hand.weights_at_hand().get(name)) is None:
        raise FileNotFoundError(
            f"the weights of {name} are not here: {get_command(name)}, or --weights=FILE"
        )
    if not pathlib.Path(path).is_file():
        raise FileNotFoundError(f"--weights: there is no file {path}")
    return pathlib.Path(path)


def opened(name: str, weights: pathlib.Path) -> loading.Bundle:
    """The bundle that `export` would write, without writing it: the net itself is its program."""
    config, preprocess, model, embed_fn = _model(name, weights)
    images = jax.ShapeDtypeStruct((1, *preprocess.shape), np.uint8)
    manifest = {
        "model": files.model_digest(model.tensors, preprocess.to_json(), config),
        "output": {
            "dimension": jax.eval_shape(model.embed_fn, model.tensors, images).shape[1],
            "similarity": "cosine",
        },
    }
    folder = pathlib.Path(name)  # for messages
    return loading.Bundle(folder, manifest, preprocess, embed_fn, exporting.BATCH_SIZES)


def _model(
    name: str, weights: pathlib.Path
) -> tuple[
    dict[str, Any],
    preprocessing.Preprocessing,
    programs.Model,
    Callable[[np.ndarray], np.ndarray],
]:
    """Config, preprocessing and model of a bundle; and the net, which must agree with the model."""
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
    net = programs.with_values(programs.model_of(config, shape, classes=1), variables)
    on_device, jitted = jax.device_put(net.tensors), jax.jit(net.embed_fn)

    def embed_fn(images: np.ndarray) -> np.ndarray:
        return np.asarray(jitted(on_device, images), np.float32)

    config, variables = programs.at_size(config, variables, shape)
    model = programs.with_values(programs.model_of(config, shape, classes=1), variables)
    preprocess = preprocessing.from_transform(config["eval_transform"], shape)
    return config, preprocess, model, embed_fn


def _facts(batch_sizes: Sequence[int]) -> dict[str, Any]:
    return {"batch_sizes": list(batch_sizes), "classes": 1, "thresholds": {}}
