"""The converted format: a safetensors file with the net's own names, and metadata.

The metadata is JSON under the key "dmljax": the net, the source and its SHA-256, the license, the
input that the weights expect, notes of the conversion, and a digest of the tensors.
"""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors.numpy

from dmljax.files import reading
from dmljax.files.writing import atomic_writer, digest_once
from dmljax.nets.files import Preprocessing
from dmljax.weights import published
from dmljax.weights.readers import read, safetensors_metadata

FORMAT = 1


def write(path: str | os.PathLike, tensors: Mapping[str, np.ndarray], metadata: str) -> None:
    """Writes a safetensors file, completely or not at all. `metadata` goes under the key dmljax."""
    # One key only: safetensors does not keep the order of several, so that the bytes would differ.
    data = safetensors.numpy.save(
        {name: np.asarray(array, order="C") for name, array in tensors.items()},
        {"dmljax": metadata},
    )
    with atomic_writer(path, "wb") as file:
        file.write(data)


def read_metadata(path: str | os.PathLike) -> dict[str, Any]:
    """Reads the metadata that `convert` wrote: net, source, SHA-256, license, inputs, notes."""
    if (metadata := metadata_if_converted(path)) is None:
        raise ValueError(
            f"{path} was not converted by dmljax and does not name its source: "
            "dmljax weights FILE --net=... --to=..."
        )
    return metadata


def metadata_if_converted(path: str | os.PathLike) -> dict[str, Any] | None:
    """Reads the same metadata; returns None for a file that was not converted."""
    text = safetensors_metadata(path).get("dmljax")
    if text is None:
        return None
    try:
        metadata = reading.json_value(text)
        version = metadata["format"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is damaged (its metadata): convert it again") from error
    if version != FORMAT:
        raise ValueError(f"{path} is of a later format, {version}: update dmljax")
    return reading.marked(metadata, path)


def expected_normalization(path: str | os.PathLike) -> str | dict[str, Any] | None:
    """Returns the value of a config's `normalize` that a file of weights expects, or None.

    It is known for converted files and for published ones (`weights.PUBLISHED`).
    """
    if (metadata := metadata_if_converted(path)) is not None:
        return metadata["inputs"]["normalization"]
    expected = expected_preprocessing(path)
    return expected and expected.normalize


def expected_preprocessing(path: str | os.PathLike) -> Preprocessing | None:
    """Returns how the images of a file of weights were prepared, or None if that is unknown.

    It is known for published files, and for those converted from files of a known family.
    """
    if (metadata := metadata_if_converted(path)) is None:
        name = published.identify(path)
        return published.PUBLISHED[name].preprocessing if name else None
    inputs = metadata.get("inputs", {})
    if not metadata.get("trained_on") or not {"size", "shorter", "filter"} <= set(inputs):
        return None  # of an unknown source
    return Preprocessing(
        inputs["size"], inputs["shorter"], inputs["filter"], inputs["normalization"]
    )


def file_digest(path: str | os.PathLike) -> str:
    """Returns the hash of the tensors that a converted file records, without reading them.

    For any other file it is the SHA-256 of the file; for an index, of index and shards.
    """
    if (metadata := metadata_if_converted(path)) is not None:
        return metadata["tensors_sha256"]
    return read(path).sha256 if str(path).endswith(".index.json") else digest_once(path)
