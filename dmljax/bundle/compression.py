"""Smaller forms of unit vectors, for an index that would not fit into memory otherwise.

| name | bytes per vector of d numbers | similarity |
|---|---|---|
| float32 | 4 d | the cosine |
| float16 | 2 d | the cosine of the rounded vectors |
| int8 | d | of values on 256 levels, four deviations of the training vectors to each side |
| binary | d / 8 | share of bits in common, which order candidates only |
| first_K | 4 K | of the first K numbers, as a unit vector again |
| pca_K | 4 K | of the K main directions of the training vectors, as a unit vector again |

The README of a bundle has what each costs on the test split of its run. Imports no jax.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from dmljax import vectors as vector_math

_LEVELS = 255
_DEVIATIONS = 4  # values of new classes lie further out than values of training classes


class Codec(NamedTuple):
    """A smaller form of unit vectors.

    * `encode(vectors float32 [n d]) -> codes [n ...]`
    * `similarities(queries float32 [q d], codes) -> float32 [q n]`, larger is closer
    """

    name: str
    bytes_per_item: int
    encode: Callable[[np.ndarray], np.ndarray]
    similarities: Callable[[np.ndarray, np.ndarray], np.ndarray]


def fit(vectors: np.ndarray) -> dict[str, np.ndarray]:
    """The numbers that the codecs need: ranges, medians and main directions of training vectors.

    The directions are eigenvectors of the uncentered second moment: rotating by them keeps cosines.
    """
    x = vectors.astype(np.float64)
    mean, reach = x.mean(axis=0), np.maximum(_DEVIATIONS * x.std(axis=0), 1e-6)
    values, directions = np.linalg.eigh(x.T @ x / len(x))
    directions = directions[:, np.argsort(-values, kind="stable")]
    # The sign of an eigenvector is arbitrary: make its largest entry positive.
    largest = np.abs(directions).argmax(axis=0)
    directions = directions * np.sign(directions[largest, np.arange(len(largest))])
    return {
        "low": np.maximum(mean - reach, -1).astype(np.float32),
        "high": np.minimum(mean + reach, 1).astype(np.float32),
        "median": np.median(vectors, axis=0).astype(np.float32),
        "directions": directions.astype(np.float32),
    }


def codecs(fitted: Mapping[str, np.ndarray]) -> dict[str, Codec]:
    """All codecs for vectors of the dimension of `fitted`, by their names."""
    d = len(fitted["low"])
    widths = [width for width in (d // 2, d // 4, d // 8) if width >= 2]
    names = ["float32", "float16", "int8", "binary"]
    names += [f"{kind}_{width}" for width in widths for kind in ("first", "pca")]
    return {name: codec(name, fitted) for name in names}


def codec(name: str, fitted: Mapping[str, np.ndarray]) -> Codec:
    """The codec with this name: 'float16', 'int8', 'binary', 'first_64', 'pca_64', ...

    It refuses vectors with NaN or infinity, and vectors of another dimension than `fitted`.
    """
    unchecked, d = _unchecked(name, fitted), len(fitted["low"])
    return unchecked._replace(
        encode=lambda x: unchecked.encode(_whole(x, d)),
        similarities=lambda queries, codes: unchecked.similarities(_whole(queries, d), codes),
    )


def _whole(vectors: np.ndarray, d: int) -> np.ndarray:
    vectors = np.asarray(vectors)
    if vectors.ndim != 2 or vectors.shape[1] != d:
        raise ValueError(f"vectors have the shape {vectors.shape}: codes need whole ones, [n, {d}]")
    if not (is_finite := np.isfinite(vectors).all(axis=1)).all():
        raise ValueError(f"vector number {is_finite.argmin()} contains NaN or infinity")
    return vectors


def _unchecked(name: str, fitted: Mapping[str, np.ndarray]) -> Codec:
    d = len(fitted["low"])
    kind, _, width = name.partition("_")
    if kind in ("first", "pca") and width.isdecimal() and 0 < int(width) <= d:
        matrix = np.eye(d, dtype=np.float32) if kind == "first" else fitted["directions"]
        return _projected(name, matrix[:, : int(width)])
    if name in ("float32", "float16"):
        dtype = np.dtype(name)
        return Codec(name, d * dtype.itemsize, lambda x: x.astype(dtype), _products)
    if name == "int8":
        return _int8(fitted["low"], fitted["high"])
    if name == "binary":
        return _binary(fitted["median"])
    raise ValueError(
        f"there is no codec {name!r} of {d} dimensions: choose {', '.join(codecs(fitted))}"
    )


def _products(queries: np.ndarray, codes: np.ndarray) -> np.ndarray:
    return queries @ codes.astype(np.float32).T


def _projected(name: str, matrix: np.ndarray) -> Codec:
    def encode(x):
        return vector_math.unit_vectors(x @ matrix)

    return Codec(
        name, 4 * matrix.shape[1], encode, lambda queries, codes: encode(queries) @ codes.T
    )


def _int8(low: np.ndarray, high: np.ndarray) -> Codec:
    step = (high - low) / _LEVELS

    def encode(x):
        levels = np.rint((x - low) / step)
        return (np.clip(levels, 0, _LEVELS) - 128).astype(np.int8)

    def similarities(queries, codes):
        return queries @ ((codes.astype(np.float32) + 128) * step + low).T

    return Codec("int8", len(low), encode, similarities)


def _binary(median: np.ndarray) -> Codec:
    def encode(x):
        return np.packbits(x > median, axis=1)

    def similarities(queries, codes):
        # +1 and -1 for the bits: their product is the number of equal bits minus the others.
        signs = 2 * np.unpackbits(codes, axis=1, count=len(median)).astype(np.float32) - 1
        bits = 2 * (queries > median).astype(np.float32) - 1
        return bits @ signs.T / len(median)

    return Codec("binary", -(-len(median) // 8), encode, similarities)


def rescored(rough: np.ndarray, exact: np.ndarray, *, candidates: int) -> np.ndarray:
    """Similarities that order the best `candidates` of `rough` by `exact`, above all others.

    Both are `[q n]`; all values lie within [-1, 1].
    """
    count = min(candidates, rough.shape[1])
    best = np.argpartition(-rough, count - 1, axis=1)[:, :count]
    result = rough - 4
    np.put_along_axis(result, best, np.take_along_axis(exact, best, axis=1), axis=1)
    return result
