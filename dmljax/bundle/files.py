"""The files of a bundle: a manifest with the SHA-256 of every other file, checked before reading.

| file | content |
|---|---|
| `manifest.json` | format, digests, versions, sizes of the input and the output, thresholds |
| `config.json` | the config of the run, with all defaults |
| `params.safetensors` | the parameters and statistics that the embedding needs |
| `embed.jaxexport` | the program (`jax.export`): parameters and `uint8 [b h w c]` to `[b d]` |
| `embed.onnx` | the same as ONNX, with the parameters inside; optional |
| `preprocess.json` | named operations from an image to the input of the program |
| `golden.safetensors` | a few images, their input and their embeddings |
| `compression.safetensors` | ranges and rotations for smaller embeddings; optional |
| `text.*`, `tokenizer.json` | tower for text, its examples and vocabulary; optional, together |
| `parity.json` | what the programs differ by |
| `README.md` | the model card |
| `signature.ed25519` | signature of the manifest's identity; optional |

Nothing that is read can run code. Imports no jax.
"""

import hashlib
import itertools
import json
import os
import pathlib
import re
import stat
from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors

from dmljax.bundle.errors import BadBundle
from dmljax.files import reading
from dmljax.files.writing import sha256

FORMAT = 1
MANIFEST = "manifest.json"
CONFIG = "config.json"
PARAMS = "params.safetensors"
PROGRAM = "embed.jaxexport"
ONNX = "embed.onnx"
PREPROCESS = "preprocess.json"
GOLDEN = "golden.safetensors"
COMPRESSION = "compression.safetensors"
TEXT_PARAMS = "text.safetensors"
TEXT_PROGRAM = "text.jaxexport"
TEXT_GOLDEN = "text.golden.safetensors"
VOCABULARY = "tokenizer.json"
PARITY = "parity.json"
CARD = "README.md"
SIGNATURE = "signature.ed25519"  # of the manifest, so the manifest does not list it
_REQUIRED = (CONFIG, PARAMS, PROGRAM, PREPROCESS, GOLDEN, PARITY, CARD)
TEXT = (TEXT_PARAMS, TEXT_PROGRAM, TEXT_GOLDEN, VOCABULARY)
_NAMES = {*_REQUIRED, ONNX, COMPRESSION, *TEXT}
_MAX_TOKENS = 4096
_MAX_MANIFEST = 1 << 20  # bytes
_MAX_HEADER = 100 << 20
_MAX_BATCH = 65536
_MAX_DIMENSION = 65536
_FIELDS = {
    "model": str,
    "batch_sizes": list,
    "thresholds": dict,
    "output.dimension": int,
    "output.similarity": str,
    "output.precision": str,
    "classes": int,
    "program.exported_on": str,
    "program.jax": str,
    "program.calling_convention": int,
}
_DIGEST = re.compile(r"[0-9a-f]{64}")
_THRESHOLD = re.compile(r"fmr=\d+e-\d+")
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


def read_manifest(folder: pathlib.Path) -> dict[str, Any]:
    """The manifest of a bundle, after a check of the folder: its files, and no others, are there.

    Digests are compared when a file is read.
    """
    if not os.path.lexists(folder):
        raise FileNotFoundError(f"there is no bundle {folder}")
    if not folder.is_dir():
        raise BadBundle(f"{folder} is not a folder: a bundle is a folder, unpack it first")
    path = folder / MANIFEST
    if not os.path.lexists(path):
        raise BadBundle(f"{folder} is not a bundle: it has no {MANIFEST}")
    manifest = _json(_regular_file(path, _MAX_MANIFEST), path)
    version = manifest.get("format")
    if version != FORMAT:
        raise BadBundle(
            f"{folder} has the bundle format {version!r}, and this program reads format {FORMAT}: "
            "use the version of dmljax that wrote it, or export the run again"
        )
    _check_entries(folder, manifest)
    if problem := _wrong_field(manifest):
        raise BadBundle(f"{MANIFEST} of {folder} is damaged: {problem}")
    if "identity" in manifest and sealed(manifest) != manifest:
        raise BadBundle(
            f"{MANIFEST} of {folder} was changed: its identity differs. Copy the bundle again, or "
            "export the run again"
        )
    return manifest


def sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest with its `identity`: SHA-256 of everything else in it, so of the whole bundle."""
    content = {name: value for name, value in manifest.items() if name != "identity"}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return {**content, "identity": hashlib.sha256(text.encode()).hexdigest()}


def signature(folder: pathlib.Path) -> bytes:
    """The signature of a bundle."""
    if not os.path.lexists(folder / SIGNATURE):
        raise BadBundle(f"{folder} is not signed: dmljax export ... --sign=KEY.pem")
    return _regular_file(folder / SIGNATURE, _MAX_MANIFEST)


def _wrong_field(manifest: Mapping[str, Any]) -> str | None:
    """What is wrong with the fields that `loading` uses, or None."""
    for path, type_ in _FIELDS.items():
        value: Any = manifest
        for name in path.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if not isinstance(value, type_) or isinstance(value, bool) != (type_ is bool):
            return f"{path} is {value!r}"
    if not _DIGEST.fullmatch(manifest["model"]):
        return f"model is {manifest['model']!r}"
    if not 0 < manifest["output"]["dimension"] <= _MAX_DIMENSION:
        return f"output.dimension is {manifest['output']['dimension']!r}"
    sizes = manifest["batch_sizes"]
    if not sizes or not all(type(n) is int and 0 < n <= _MAX_BATCH for n in sizes):
        return f"batch_sizes is {sizes!r}"
    for name, entry in manifest["thresholds"].items():
        cosine = entry.get("cosine") if isinstance(entry, dict) else None
        if not isinstance(cosine, float | int) or not -1 <= cosine <= 1:
            return f"thresholds.{name} is {entry!r}"
        if not _THRESHOLD.fullmatch(name):
            return f"thresholds has the name {name!r}"
    prefixes = manifest.get("prefixes", [])
    is_ascending = isinstance(prefixes, list) and all(type(n) is int for n in prefixes)
    bounds = [0, *prefixes, manifest["output"]["dimension"] + 1] if is_ascending else [0, 0]
    if any(a >= b for a, b in itertools.pairwise(bounds)):
        return f"prefixes is {prefixes!r}"
    return _wrong_text(manifest)


def _wrong_text(manifest: Mapping[str, Any]) -> str | None:
    """What is wrong with the rule for tokens, which belongs to the files for text, or None."""
    rule, present = manifest.get("text"), set(TEXT) & set(manifest["files"])
    if rule is None and not present:
        return None
    types = {"length": int, "begin": str | None, "end": str, "padding": str, "lowercase": bool}
    if present != set(TEXT) or not isinstance(rule, dict) or set(rule) != set(types):
        return f"text is {rule!r}, with the files {', '.join(sorted(present)) or 'none'}"
    for name, type_ in types.items():
        if not isinstance(rule[name], type_):
            return f"text.{name} is {rule[name]!r}"
    if not 2 < rule["length"] <= _MAX_TOKENS:
        return f"text.length is {rule['length']!r}"
    return None


def _json(data: bytes, path: pathlib.Path) -> dict[str, Any]:
    """The object in the bytes of a JSON file, as `reading.marked`."""

    def refuse(constant: str):
        raise ValueError(f"{constant} is not JSON")

    try:
        content = reading.marked(reading.json_value(data, parse_constant=refuse), path)
    except ValueError as error:
        raise BadBundle(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise BadBundle(f"{path} is damaged: it holds no object")
    return content


def _check_entries(folder: pathlib.Path, manifest: Mapping[str, Any]) -> None:
    entries = manifest.get("files")
    if not isinstance(entries, dict):
        raise BadBundle(f"{MANIFEST} is damaged: it lists no files")
    for name, entry in entries.items():
        if name not in _NAMES:
            raise BadBundle(f"{MANIFEST} lists {name[:200]!r}, which is no file of a bundle")
        size = entry.get("bytes") if isinstance(entry, dict) else None
        digest = entry.get("sha256") if isinstance(entry, dict) else None
        if (
            not isinstance(size, int)
            or not isinstance(digest, str)
            or not _DIGEST.fullmatch(digest)
        ):
            raise BadBundle(f"{MANIFEST} is damaged: {name} needs bytes and sha256")
    if missing := sorted(set(_REQUIRED) - set(entries)):
        raise BadBundle(f"{MANIFEST} lists no {', '.join(missing)}")
    present = set(os.listdir(folder)) - {MANIFEST, SIGNATURE}
    if missing := sorted(set(entries) - present):
        raise BadBundle(f"{folder} is not complete: {', '.join(missing)} is missing")
    if extra := sorted(present - set(entries)):
        raise BadBundle(f"{folder} has a file that its manifest does not list: {extra[0]!r}")
    for name, entry in entries.items():
        status = (folder / name).lstat()
        if not stat.S_ISREG(status.st_mode):
            raise BadBundle(f"{name} of {folder} is a link or a folder: a bundle has plain files")
        if status.st_size != entry["bytes"]:
            raise BadBundle(
                f"{name} of {folder} is changed: it has {status.st_size:,} bytes, and the manifest "
                f"says {entry['bytes']:,}"
            )


def _regular_file(path: pathlib.Path, limit: int | None = None) -> bytes:
    """The content of a file that is neither a link nor a device."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | os.O_NONBLOCK)
    except OSError as error:
        raise BadBundle(f"{path} cannot be read: {error.strerror}") from error
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise BadBundle(f"{path} is a link or a folder: a bundle has plain files")
        if limit is not None and status.st_size > limit:
            raise BadBundle(f"{path} has {status.st_size:,} bytes: the limit is {limit:,}")
        return file.read()


def read(folder: pathlib.Path, manifest: Mapping[str, Any], name: str) -> bytes:
    """The content of a file; raises `BadBundle` unless its digest is in the manifest."""
    if name not in manifest["files"]:
        raise BadBundle(f"{folder} has no {name}")
    data = _regular_file(folder / name)
    if hashlib.sha256(data).hexdigest() != manifest["files"][name]["sha256"]:
        raise BadBundle(
            f"{name} of {folder} is changed or damaged: the manifest has another SHA-256"
        )
    return data


def read_json(folder: pathlib.Path, manifest: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The object in a JSON file, with its digest checked; see `reading.marked`."""
    return _json(read(folder, manifest, name), folder / name)


def read_tensors(
    folder: pathlib.Path, manifest: Mapping[str, Any], name: str
) -> dict[str, np.ndarray]:
    """The arrays of a safetensors file, with its digest checked."""
    return parse_tensors(read(folder, manifest, name), name)


def parse_tensors(data: bytes, name: str) -> dict[str, np.ndarray]:
    """The arrays in the bytes of a safetensors file, which messages call `name`."""
    header = int.from_bytes(data[:8], "little")
    if header > _MAX_HEADER:
        raise BadBundle(f"{name} is damaged: its header says {header:,} bytes")
    try:
        entries = safetensors.deserialize(data)
    except safetensors.SafetensorError as error:
        raise BadBundle(f"{name} is damaged: {error}") from error
    tensors = {}
    for key, entry in entries:
        if entry["dtype"] not in _DTYPES:
            raise BadBundle(f"{name} holds {key} as {entry['dtype']}, which is not read")
        tensors[key] = np.frombuffer(entry["data"], _DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def check_tensors(
    tensors: Mapping[str, np.ndarray], expected: Mapping[str, Any], *, name: str
) -> None:
    """Raises `BadBundle` with all differences of names, shapes and types, and for NaN.

    `expected` has anything with a shape and a dtype under the same names.
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


def digests(folder: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Bytes and SHA-256 of every file of a folder but the manifest and its signature."""
    names = set(os.listdir(folder)) - {MANIFEST, SIGNATURE}
    files = (folder / name for name in sorted(names))
    return {path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)} for path in files}


def tensors_digest(tensors: Mapping[str, np.ndarray]) -> str:
    """SHA-256 of names, types, shapes and values, whatever the file that holds them."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        array = np.ascontiguousarray(tensors[name])
        sha.update(f"{name}\0{array.dtype.str}\0{list(array.shape)}\0".encode())
        sha.update(array.tobytes())
    return sha.hexdigest()


def model_digest(
    tensors: Mapping[str, np.ndarray], preprocess: Any, config: Mapping[str, Any]
) -> str:
    """SHA-256 of the embedding function: of parameters, preprocessing, net and method.

    The program is not part of it. A rebuilt program must give the stored embeddings, so that stored
    vectors stay valid.
    """
    names = ("net", "method", "normalize")
    if missing := [name for name in names if name not in config]:
        raise BadBundle(f"{CONFIG} has no {', '.join(missing)}: export the run again")
    architecture = {name: config[name] for name in names}
    if isinstance(architecture["net"], dict):
        architecture["net"] = {k: v for k, v in architecture["net"].items() if k != "weights"}
    parts = [tensors_digest(tensors), preprocess, architecture]
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()
