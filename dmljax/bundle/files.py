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
import itertools
import json
import os
import pathlib
import re
import stat
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
import safetensors

from dmljax.bundle.errors import BadBundle
from dmljax.files import reading, schema
from dmljax.files.writing import sha256, write_json

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
TEXT = (TEXT_PARAMS, TEXT_PROGRAM, TEXT_GOLDEN, VOCABULARY)
_REQUIRED = (PARAMS, PROGRAM, GOLDEN)
_NAMES = (*_REQUIRED, ONNX, CARD, *TEXT)
_MAX_MANIFEST = 1 << 20  # bytes
_MAX_HEADER = 100 << 20
_DTYPES = {
    "F32": np.float32,
    "F16": np.float16,
    "F64": np.float64,
    "I64": np.int64,
    "I32": np.int32,
    "U32": np.uint32,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}

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


@dataclasses.dataclass(frozen=True)
class File:
    """Size and SHA-256 of a file."""

    bytes: _Count
    sha256: _Digest


@dataclasses.dataclass(frozen=True)
class Output:
    """The embeddings: `similarity` is 'cosine' for unit vectors, and 'euclidean' otherwise."""

    dimension: _Size
    unit: bool
    similarity: str
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
        files: the other files of the bundle.
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
    prefixes: tuple[_Size, ...] = ()
    text: TokenRule | None = None
    parity: dict[str, Any] = dataclasses.field(default_factory=dict)
    files: dict[_FileName, File] = dataclasses.field(default_factory=dict)
    identity: str = ""

    def problem(self) -> str | None:
        """Returns a contradiction between fields, or None."""
        if missing := [name for name in _REQUIRED if name not in self.files]:
            return f"files has no {missing[0]}"
        bounds = [0, *self.prefixes, self.output.dimension + 1]
        if any(a >= b for a, b in itertools.pairwise(bounds)):
            return f"prefixes must ascend to {self.output.dimension}, got {list(self.prefixes)}"
        if (set(TEXT) & set(self.files)) != (set(TEXT) if self.text else set()):
            return f"text and the files {', '.join(TEXT)} belong together"
        return None


def identity(content: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of the content of a manifest, except for its field `identity`."""
    return _json_digest({k: v for k, v in content.items() if k != "identity"})


def _json_digest(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def write_manifest(folder: pathlib.Path, manifest: Manifest) -> Manifest:
    """Writes the manifest of the files that are in `folder`, and returns it."""
    paths = [folder / name for name in sorted(set(os.listdir(folder)) - {MANIFEST})]
    files = {path.name: File(path.stat().st_size, sha256(path)) for path in paths}
    manifest = dataclasses.replace(manifest, files=files)
    manifest = dataclasses.replace(manifest, identity=identity(dataclasses.asdict(manifest)))
    write_json(folder / MANIFEST, dataclasses.asdict(manifest), indent=2)
    return manifest


def read_manifest(folder: pathlib.Path) -> Manifest:
    """Reads the manifest of a bundle and checks that exactly its files are in the folder.

    Digests of files are compared when a file is read.
    """
    if not os.path.lexists(folder):
        raise FileNotFoundError(f"the bundle {folder} does not exist")
    path = folder / MANIFEST
    if not folder.is_dir() or not os.path.lexists(path):
        raise BadBundle(f"{folder} is not a bundle: a bundle is a folder with a {MANIFEST}")
    data = _plain_file(path, limit=_MAX_MANIFEST)
    try:
        content = reading.marked(reading.json_value(data, parse_constant=_refuse_constant), path)
        manifest = schema.parse(Manifest, content)
        is_changed = identity(content) != manifest.identity
        if problem := manifest.problem() or ("its identity differs" if is_changed else None):
            raise ValueError(problem)
    except ValueError as error:
        raise BadBundle(
            f"{path} cannot be used: {error}. Copy the bundle again, or export the run again"
        ) from error
    if different := set(os.listdir(folder)) - {MANIFEST} ^ set(manifest.files):
        name = min(different)
        state = "is missing" if name in manifest.files else "is not in its manifest"
        raise BadBundle(f"{folder} is not complete, or has other files: {name!r} {state}")
    return manifest


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _plain_file(path: pathlib.Path, *, limit: int | None = None, size: int | None = None) -> bytes:
    """Returns the content of a file that is neither a link nor a device."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | os.O_NONBLOCK)
    except OSError as error:
        raise BadBundle(f"{path} cannot be read: {error.strerror}") from error
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise BadBundle(f"{path} is a folder or a device: a bundle has plain files")
        if status.st_size != (status.st_size if size is None else size) or (
            limit is not None and status.st_size > limit
        ):
            expected = f"at most {limit:,}" if size is None else f"{size:,}"
            raise BadBundle(f"{path} has {status.st_size:,} bytes, not {expected}")
        return file.read()


def read(folder: pathlib.Path, manifest: Manifest, name: str) -> bytes:
    """Returns the content of a file; raises `BadBundle` unless the manifest has its SHA-256."""
    if name not in manifest.files:
        raise BadBundle(f"{folder} has no {name}: export it again with this file")
    entry = manifest.files[name]
    data = _plain_file(folder / name, size=entry.bytes)
    if hashlib.sha256(data).hexdigest() != entry.sha256:
        raise BadBundle(f"{folder / name} is damaged or changed: its SHA-256 is not the manifest's")
    return data


def read_tensors(folder: pathlib.Path, manifest: Manifest, name: str) -> dict[str, np.ndarray]:
    """Returns the arrays of a safetensors file, after comparing its SHA-256."""
    data = read(folder, manifest, name)
    try:
        if (header := int.from_bytes(data[:8], "little")) > _MAX_HEADER:
            raise ValueError(f"its header has {header:,} bytes")
        return {
            key: np.frombuffer(entry["data"], _DTYPES[entry["dtype"]]).reshape(entry["shape"])
            for key, entry in safetensors.deserialize(data)
        }
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise BadBundle(f"{name} of {folder} is damaged: {error}") from error


def check_tensors(
    tensors: Mapping[str, np.ndarray], expected: Mapping[str, Any], *, name: str
) -> None:
    """Raises `BadBundle` with all differences of names, shapes and types, and for NaN.

    `expected` has objects with a shape and a dtype under the same names.
    """
    problems = [f"{key} is missing" for key in sorted(set(expected) - set(tensors))]
    problems += [f"{key} is not of this net" for key in sorted(set(tensors) - set(expected))]
    for key in sorted(set(expected) & set(tensors)):
        old, new = tensors[key], expected[key]
        if old.shape != tuple(new.shape) or old.dtype != new.dtype:
            problems.append(
                f"{key} is {old.dtype} {list(old.shape)} and should be {new.dtype} "
                f"{list(new.shape)}"
            )
        elif old.dtype.kind == "f" and not np.isfinite(old).all():
            problems.append(f"{key} has NaN or infinity")
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise BadBundle(f"{name} does not fit the program: {'; '.join(problems[:8])}{more}")


def tensors_digest(tensors: Mapping[str, np.ndarray]) -> str:
    """Returns the SHA-256 of names, types, shapes and values, whatever file holds them."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        array = np.ascontiguousarray(tensors[name])
        sha.update(f"{name}\0{array.dtype.str}\0{list(array.shape)}\0".encode())
        sha.update(array.tobytes())
    return sha.hexdigest()


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
    return _json_digest(parts)
