"""Published files, rewritten in the converted format."""

import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import numpy as np
from flax import traverse_util

from dmljax.adapt import lowrank
from dmljax.files.writing import tensors_digest
from dmljax.hints import check_all
from dmljax.nets.files import Preprocessing, Published
from dmljax.weights import converted, peft
from dmljax.weights.loading import (
    FLAX,
    IMAGE_SIZE,
    TORCH,
    fit,
    load,
    name_map_of,
    read_published,
    torch_tensors,
)
from dmljax.weights.published import PUBLISHED, identify
from dmljax.weights.readers import Weights

_UNKNOWN = "unknown, as the file is not in the list"


def convert(
    path: str | os.PathLike,
    net: nn.Module,
    to: str | os.PathLike,
    *,
    spec: Mapping[str, Any],
    adapter: str | os.PathLike | None = None,
) -> dict[str, Any]:
    """Writes a published file as a converted one, completely or not at all; returns its metadata.

    The file is checked against `net`, as by `load`. A file that is not in `PUBLISHED` is
    assumed to expect the input that `net` expects. `spec` describes the net in the metadata
    as a config does: `dict(name="resnet50", classes=1000)`. `adapter` is a folder of the package
    peft (`peft.load_adapter`), which is added to the kernels; then the file may be a converted one,
    which records the digest of every adapter in it: the same one is not added twice.
    """
    weights = read_published(path)
    folder, metadata = pathlib.Path(to).parent, converted.metadata_if_converted(path)
    problems = {
        f"{to} must end in .safetensors": pathlib.Path(to).suffix != ".safetensors",
        f"the folder {folder} does not exist": not folder.is_dir(),
        f"{path} is converted already": metadata is not None and adapter is None,
    }
    check_all(problems)
    notes: list[str] = []
    if metadata is not None:
        variables = load(path, net)
    else:
        file_tensors = torch_tensors(weights)
        variables = fit(str(path), file_tensors, net, TORCH, notes.append)
        metadata = _metadata(
            path, weights, net, spec, has_map=bool(name_map_of(file_tensors).marks)
        )
    if adapter is not None:
        adapters = peft.load_adapter(
            adapter, net, base=path, params=variables["params"], report_fn=notes.append
        )
        flat = traverse_util.flatten_dict(adapters)
        # The factors alone: norms of DoRA may be the norms of the weights.
        digest = tensors_digest({"/".join(p): x for p, x in flat.items() if p[-1] in ("a", "b")})
        if digest in metadata.get("adapters", []):
            raise ValueError(
                f"{path} has the adapter {adapter} already: give another one, or the weights "
                f"without it ({metadata['source']['file']})"
            )
        params = lowrank.merged(variables["params"], adapters, scale=1.0)
        variables = {**variables, "params": params}
        notes.append(f"the adapter {pathlib.Path(adapter).name} is added to the kernels")
        metadata["adapters"] = [*metadata.get("adapters", []), digest]
    metadata["notes"] += [note.removeprefix(f"{path}: ") for note in notes]
    flat = traverse_util.flatten_dict(variables)
    tensors = {FLAX.name_fn(path): np.asarray(x) for path, x in flat.items()}
    metadata["tensors_sha256"] = tensors_digest(tensors)
    converted.write(to, tensors, json.dumps(metadata, sort_keys=True))
    return metadata


def _metadata(
    path: str | os.PathLike,
    weights: Weights,
    net: nn.Module,
    spec: Mapping[str, Any],
    has_map: bool,
) -> dict[str, Any]:
    """Returns what is known about a published file; with `has_map`, the names of its tensors are
    those of a family's own files.
    """
    name, assumed = identify(path), ""
    published = PUBLISHED[name] if name else None
    if published is None and has_map:
        published, assumed = _of_net(spec["name"]), " (assumed from the names of the tensors)"
    expected = published.preprocessing if published else None
    if expected is None and (normalize := getattr(net, "expected_normalization", None)):
        expected = Preprocessing(normalize=normalize)
    inputs: dict[str, Any] = {"size": IMAGE_SIZE, "normalization": None}
    if expected is not None:
        inputs = expected._asdict() | expected.inputs
        inputs["normalization"] = inputs.pop("normalize")
    return {
        "format": converted.FORMAT,
        "net": dict(spec),
        "source": {
            "file": pathlib.Path(path).name,
            "sha256": weights.sha256,
            "known_as": name,
            "url": published.urls[0] if name and published else None,
        },
        "license": f"{published.license}{assumed}" if published else _UNKNOWN,
        "trained_on": published.trained_on if published else None,
        "inputs": inputs,
        "notes": [],
    }


def _of_net(net: str) -> Published | None:
    """Returns an entry of the table for `net` if all of its entries have one license and one
    input.
    """
    entries = [entry for entry in PUBLISHED.values() if entry.net == net]
    kinds = {(entry.license, str(entry.preprocessing)) for entry in entries}
    return entries[0] if len(kinds) == 1 else None
