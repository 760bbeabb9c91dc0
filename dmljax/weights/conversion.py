"""Published files, rewritten in the converted format."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
from flax import traverse_util

from dmljax.weights import converted
from dmljax.weights.layouts import FLAX, layout_of, torch_tensors
from dmljax.weights.loading import IMAGE_SIZE, fit, read_published
from dmljax.weights.preprocessing import INPUTS
from dmljax.weights.published import PUBLISHED, identify

__all__ = ["convert"]


def convert(
    path: str | os.PathLike,
    net: nn.Module,
    to: str | os.PathLike,
    *,
    spec: Mapping[str, Any],
) -> dict[str, Any]:
    """Writes a published file as a converted one, completely or not at all; returns its metadata.

    The file is checked against `net`, as by `load`. A file that is not in `PUBLISHED` is
    assumed to expect the input that `net` expects. `spec` describes the net in the metadata
    as a config does: `dict(name="resnet50", classes=1000)`.
    """
    if pathlib.Path(to).suffix != ".safetensors":
        raise ValueError(f"{to} must end in .safetensors")
    if not pathlib.Path(to).parent.is_dir():
        raise FileNotFoundError(f"the folder {pathlib.Path(to).parent} does not exist")
    weights = read_published(path)
    if "dmljax" in weights.metadata:
        raise ValueError(f"{path} is converted already")
    notes: list[str] = []
    variables = fit(str(path), torch_tensors(weights), net, layout_of(net), notes.append)
    tensors = {FLAX.name_fn(k): v for k, v in traverse_util.flatten_dict(variables).items()}
    name = identify(path)
    published = PUBLISHED[name] if name else None
    net_normalization = getattr(net, "expected_normalization", None)
    normalization = published.normalization if published else net_normalization
    inputs = {"size": IMAGE_SIZE, "normalization": normalization}
    if normalization is not None:
        inputs |= INPUTS[normalization]
    metadata = {
        "format": converted.FORMAT,
        "net": dict(spec),
        "source": {
            "file": pathlib.Path(path).name,
            "sha256": weights.sha256,
            "known_as": name,
            "url": published.url if published else None,
        },
        "license": published.license if published else "unknown, as the file is not in the list",
        "inputs": inputs,
        "notes": [note.removeprefix(f"{path}: ") for note in notes],
        "tensors_sha256": converted.digest(tensors),
    }
    converted.write(to, tensors, json.dumps(metadata, sort_keys=True))
    return metadata
