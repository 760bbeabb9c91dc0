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
from dmljax.weights import converted, peft
from dmljax.weights.entries import Preprocessing, Published
from dmljax.weights.loading import IMAGE_SIZE, fit, load, name_map_of, read_published
from dmljax.weights.names import FLAX, TORCH, torch_tensors
from dmljax.weights.published import PUBLISHED, identify

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
    if pathlib.Path(to).suffix != ".safetensors":
        raise ValueError(f"{to} must end in .safetensors")
    if not pathlib.Path(to).parent.is_dir():
        raise FileNotFoundError(f"the folder {pathlib.Path(to).parent} does not exist")
    weights = read_published(path)
    notes: list[str] = []
    adapters = None
    if adapter is not None:
        adapters = peft.load_adapter(adapter, net, base=path, report_fn=notes.append)
    if "dmljax" in weights.metadata:
        if adapter is None:
            raise ValueError(f"{path} is converted already")
        metadata = converted.metadata_of(path, weights)
        if _digest(adapters) in metadata.get("adapters", []):
            raise ValueError(
                f"{path} has the adapter {adapter} already: give another one, or the weights "
                f"without it ({metadata['source']['file']})"
            )
        variables = load(path, net)
        metadata = metadata | {"notes": metadata["notes"] + notes}
        return _written(to, variables, metadata, adapter, adapters)
    file_tensors = torch_tensors(weights)
    variables = fit(str(path), file_tensors, net, TORCH, notes.append)
    name, assumed = identify(path), ""
    published = PUBLISHED[name] if name else None
    if published is None and name_map_of(file_tensors).marks:
        # The tensors have the names of a family's own files.
        published, assumed = _of_net(spec["name"]), " (assumed from the names of the tensors)"
    expected = published.preprocessing if published else _expected_input(net)
    inputs = {}
    if expected is not None:
        inputs = expected._asdict() | expected.inputs
        inputs["normalization"] = inputs.pop("normalize")
    metadata = {
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
        "inputs": inputs or {"size": IMAGE_SIZE, "normalization": None},
        "notes": [note.removeprefix(f"{path}: ") for note in notes],
    }
    return _written(to, variables, metadata, adapter, adapters)


def _digest(adapters: Any) -> str:
    """Hashes the factors alone; norms of DoRA may be the norms of the weights."""
    flat = traverse_util.flatten_dict(adapters)
    return converted.digest({"/".join(p): x for p, x in flat.items() if p[-1] in ("a", "b")})


def _written(
    to: str | os.PathLike,
    variables: Mapping[str, Any],
    metadata: dict[str, Any],
    adapter: str | os.PathLike | None,
    adapters: Any,
) -> dict[str, Any]:
    """Writes the file with the adapters; returns the metadata with the digest of its tensors."""
    if adapter is not None:
        params = lowrank.merged(variables["params"], adapters, scale=1.0)
        variables = {**variables, "params": params}
        note = f"the adapter {pathlib.Path(adapter).name} is added to the kernels"
        digests = [*metadata.get("adapters", []), _digest(adapters)]
        metadata = metadata | {"notes": [*metadata["notes"], note], "adapters": digests}
    flat = traverse_util.flatten_dict(variables)
    tensors = {FLAX.name_fn(path): np.asarray(x) for path, x in flat.items()}
    metadata = metadata | {"tensors_sha256": converted.digest(tensors)}
    converted.write(to, tensors, json.dumps(metadata, sort_keys=True))
    return metadata


def _of_net(net: str) -> Published | None:
    """Returns an entry of the table for `net` if all of its entries have one license and one
    input.
    """
    entries = [entry for entry in PUBLISHED.values() if entry.net == net]
    kinds = {(entry.license, str(entry.preprocessing)) for entry in entries}
    return entries[0] if len(kinds) == 1 else None


def _expected_input(net: nn.Module) -> Preprocessing | None:
    """Returns the input that a net expects if its file is unknown."""
    expected = getattr(net, "expected_normalization", None)
    if expected is None:
        return None
    return Preprocessing(normalize=expected if isinstance(expected, str) else dict(expected))
