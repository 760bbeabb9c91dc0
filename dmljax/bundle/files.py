"""The files of a bundle: a manifest with the SHA-256 of every other file, checked before reading.

| file | content |
|---|---|
| `manifest.json` | `Manifest`: config, preprocessing, sizes, thresholds, parity, digests |
| `params.safetensors` | the parameters and statistics that the embedding needs |
| `embed.jaxexport` | the program (`jax.export`): parameters and `uint8 [b h w c]` to `[b d]` |
| `embed.onnx` | the same program as ONNX, with its parameters; optional |
| `golden.safetensors` | a few images, their input and their embeddings |
| `text.*`, `tokenizer.json` | a tower for text, its examples, its vocabulary; optional |
| `README.md` | the model card |

No file runs code when it is read. Imports no jax.
"""

import dataclasses
import hashlib
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
import safetensors.numpy

from dmljax.bundle.errors import BadBundle
from dmljax.files import reading, schema
from dmljax.files.writing import json_digest, sha256, tensors_digest, write_json
from dmljax.index.nearest import SIMILARITIES

FORMAT = 1
MANIFEST = "manifest.json"
PARAMS = "params.safetensors"
PROGRAM = "embed.jaxexport"
ONNX = "embed.onnx"
GOLDEN = "golden.safetensors"
TEXT_PARAMS = "text.safetensors"
TEXT_PROGRAM = "text.jaxexport"
TEXT_GOLDEN = "text.golden.safetensors"
VOCABULARY = "tokenizer.json"
CARD = "README.md"
_OF_TEXT = (TEXT_PARAMS, TEXT_PROGRAM, TEXT_GOLDEN, VOCABULARY)
_NAMES = (PARAMS, PROGRAM, GOLDEN, ONNX, CARD, *_OF_TEXT)

_Size = Annotated[int, schema.between(1, 65536)]
_Count = Annotated[int, schema.between(0, 2**62)]
_Rate = Annotated[float, schema.between(0, 1)]
_Digest = Annotated[
    str, schema.Limit(re.compile(r"[0-9a-f]{64}").fullmatch, "64 hexadecimal digits")
]
_ThresholdName = Annotated[
    str, schema.Limit(re.compile(r"fmr=\d+e-\d+").fullmatch, "a rate such as fmr=1e-3")
]
_FileName = Annotated[str, schema.Limit(_NAMES.__contains__, f"one of {', '.join(_NAMES)}")]
_ASCENDING = schema.Limit(lambda x: list(x) == sorted(set(x)), "in ascending order")


@dataclasses.dataclass(frozen=True)
class Output:
    """The embeddings, and how they are compared (`index.nearest.SIMILARITIES`)."""

    dimension: _Size
    unit: bool
    similarity: Annotated[str, schema.Limit(SIMILARITIES.__contains__, "known")]
    precision: str


@dataclasses.dataclass(frozen=True)
class Program:
    """Where and when the programs were exported; dates are in ISO format."""

    platforms: tuple[str, ...]
    jax: str
    jaxlib: str
    exported_on: str
    exported: str
    promised_until: str


@dataclasses.dataclass(frozen=True)
class Rates:
    """The rates of a threshold on test images, with intervals over classes; None: not measured."""

    fmr: _Rate | None = None
    fnmr: _Rate | None = None
    fmr_interval: tuple[float, ...] | None = None
    fnmr_interval: tuple[float, ...] | None = None
    different_pairs: _Count = 0
    same_pairs: _Count = 0
    known_refused: _Rate | None = None
    strangers_refused: _Rate | None = None


@dataclasses.dataclass(frozen=True)
class Threshold:
    """A cosine from which two images count as the same, and the rates that it has on test images.

    It was chosen on `pairs` pairs of different classes of the split `chosen_on`.
    """

    cosine: Annotated[float, schema.between(-1, 1)]
    chosen_on: str = "test"
    pairs: _Count = 0
    test: Rates = Rates()


@dataclasses.dataclass(frozen=True)
class TokenRule:
    """How text becomes tokens: lower case, `begin`, the words, `end`, `padding` up to `length`."""

    length: Annotated[int, schema.between(3, 4096)]
    begin: str | None
    end: str
    padding: str
    lowercase: bool


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Everything about a bundle that is not an array, a program or prose.

    Attributes:
        model: SHA-256 of the embedding function, by `model_digest`.
        config: the config of the run, with all defaults.
        preprocess: the operations before the program, as `preprocessing.parse` reads them.
        classes: the number of training classes.
        prefixes: widths of the shorter embeddings inside, ascending.
        text: the rule for tokens; None without a tower for text.
        parity: the comparison of the programs with the checkpoint.
        files: the SHA-256 of every other file of the bundle.
        identity: SHA-256 of all other fields, and so of the whole bundle.
    """

    format: Annotated[int, schema.Limit(FORMAT.__eq__, f"{FORMAT}")]
    dmljax: str
    model: _Digest
    config: dict[str, Any]
    preprocess: dict[str, Any]
    output: Output
    program: Program
    batch_sizes: Annotated[tuple[_Size, ...], schema.Limit(bool, "a list of one size or more")]
    classes: _Count
    thresholds: dict[_ThresholdName, Threshold] = dataclasses.field(default_factory=dict)
    prefixes: Annotated[tuple[_Size, ...], _ASCENDING] = ()
    text: TokenRule | None = None
    parity: dict[str, Any] = dataclasses.field(default_factory=dict)
    files: dict[_FileName, _Digest] = dataclasses.field(default_factory=dict)
    identity: str = ""


def identity(content: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of the content of a manifest, except for its field `identity`."""
    return json_digest({k: v for k, v in content.items() if k != "identity"})


def write_manifest(folder: pathlib.Path, manifest: Manifest) -> Manifest:
    """Writes the manifest of the files that are in `folder`, and returns it."""
    files = {name: sha256(folder / name) for name in sorted(set(os.listdir(folder)) - {MANIFEST})}
    manifest = dataclasses.replace(manifest, files=files)
    manifest = dataclasses.replace(manifest, identity=identity(dataclasses.asdict(manifest)))
    write_json(folder / MANIFEST, dataclasses.asdict(manifest), indent=2)
    return manifest


def read_manifest(folder: pathlib.Path) -> Manifest:
    """Reads the manifest of a bundle and checks it. `read` compares the digests of files."""
    if not folder.exists():
        raise FileNotFoundError(f"the bundle {folder} does not exist")
    path = folder / MANIFEST
    if path.is_symlink() or not path.is_file():
        raise BadBundle(f"{folder} is not a bundle: a bundle is a folder with a {MANIFEST}")
    try:
        content = reading.marked(reading.json_value(path.read_bytes()), path)
        manifest = schema.parse(Manifest, content)
        if identity(content) != manifest.identity:
            raise ValueError("its identity differs")
        if others := set(os.listdir(folder)) - {MANIFEST, *manifest.files}:
            raise ValueError(f"the folder has another file, {min(others)}")
    except ValueError as error:
        raise BadBundle(
            f"{path} cannot be used: {error}. Copy the bundle again, or export the run again"
        ) from error
    return manifest


def read(folder: pathlib.Path, manifest: Manifest, name: str) -> bytes:
    """Returns the content of a file; raises `BadBundle` unless the manifest has its SHA-256."""
    if name not in manifest.files:
        raise BadBundle(f"{folder} has no {name}: export it again with this file")
    path = folder / name
    if path.is_symlink() or not path.is_file():
        raise BadBundle(f"{folder} is not complete: {name} is missing, or is a link")
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != manifest.files[name]:
        raise BadBundle(f"{path} is damaged or changed: its SHA-256 is not the manifest's")
    return data


def read_tensors(folder: pathlib.Path, manifest: Manifest, name: str) -> dict[str, np.ndarray]:
    """Returns the arrays of a safetensors file, after comparing its SHA-256."""
    try:
        return safetensors.numpy.load(read(folder, manifest, name))
    except (safetensors.SafetensorError, KeyError, TypeError) as error:
        raise BadBundle(f"{name} of {folder} is damaged: {error}") from error


def model_digest(
    tensors: Mapping[str, np.ndarray], preprocess: Any, config: Mapping[str, Any]
) -> str:
    """Returns the SHA-256 of the embedding function: parameters, preprocessing, net and method.

    The program is not part of it: a program that another version of JAX exports from the same
    values has the same digest, so stored vectors stay valid.
    """
    architecture = {name: config.get(name) for name in ("net", "method", "normalize")}
    if isinstance(architecture["net"], dict):
        architecture["net"] = {k: v for k, v in architecture["net"].items() if k != "weights"}
    parts = [tensors_digest(tensors), preprocess, architecture]
    return json_digest(parts)
