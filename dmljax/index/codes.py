"""Short codes of vectors for a search in two stages, derived from the database.

The first stage compares the code of the query with the codes of all items: bits, by their Hamming
distance, or a prefix of each vector, by its cosine. The second stage compares the best candidates
by their whole vectors. The manifest records how many candidates reach the recall@10 that was
measured when the codes were made. Only cosines have codes.

The bits are the signs of the numbers after a rotation. The share of bits in which two vectors
differ is then an estimate of their angle over pi (Charikar, STOC 2002; orthogonal directions make
it better: Ji et al., NeurIPS 2012). Without the rotation, numbers of little variance would count as
much as others.
"""

import hashlib
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from dmljax.index import matrix, nearest, tuning
from dmljax.index.matrix import Matrix, Position
from dmljax.index.rows import Rows

First = int | str  # what the first stage compares: the width of a prefix, or 'bits'
_ROWS = 1 << 15  # rows whose bits are compared at once: their distances stay in the cache
_ENCODED = 1 << 12  # rows that are encoded at once


class Codes(NamedTuple):
    """Codes of the rows up to `last_row`, as they were at change `version`."""

    version: int
    last_row: int
    first: First
    candidates: int
    recalls: dict[str, float]  # by the kind of query
    wanted: float
    least: float | None  # a query with a best hit below it is strange: see `tuning.least`
    rows: Rows  # the codes are its vectors: float32 [n prefix], or 64 bits in a number [n words]

    @property
    def size(self) -> int:
        """The number of rows that are not deleted."""
        return len(self.rows.rows) - self.rows.deleted

    def search(
        self, queries: np.ndarray, k: int, *, allowed: np.ndarray | None = None
    ) -> list[np.ndarray]:
        """Row numbers of candidates for the k best of each query, among the `allowed` rows.

        Candidates are in the order of their codes, and equal codes in the order of their rows.
        """
        count = tuning.width_for(self.candidates, k)
        where, rows, codes = self.rows.mask(allowed), self.rows.rows, self.rows.vectors
        short = encoded(queries, self.first)
        if self.first == "bits":
            return [rows[_nearest_bits(bits, codes, count, where)] for bits in short]
        near = nearest.candidates(short, codes, count, similarity="cosine", where=where)
        results = []
        for query, places in zip(short, near, strict=True):
            # float64 decides, so that a result does not depend on the other queries of a call.
            values = nearest.similarities(query, codes[places], similarity="cosine")
            results.append(rows[places[nearest.best(values, places, count)]])
        return results

    def delete(self, rows: np.ndarray) -> None:
        """Leaves rows out from now on."""
        self.rows.delete(rows)


def encoded(vectors: np.ndarray, first: First) -> np.ndarray:
    """The codes of vectors [n, d]: bits in uint64 [n, words], or prefixes float32 [n, first]."""
    if not isinstance(first, str):
        return nearest.prefix(vectors, first)
    return np.packbits(_rotated(vectors) > 0, axis=1).view(np.uint64)


def _rotated(vectors: np.ndarray) -> np.ndarray:
    """Vectors [n, d], padded to [n, p] and rotated: signs, then a Hadamard transform, both twice.

    Every number of the result has a share of all d numbers. Nothing is rounded in another way on
    another machine, so codes and queries may be of different machines.
    """
    n, width = len(vectors), _bits(vectors.shape[1])
    x = np.zeros((n, width), np.float32)
    x[:, : vectors.shape[1]] = vectors
    noise = hashlib.shake_256(b"dmljax").digest(width // 4)  # the same bits for ever
    for signs in np.unpackbits(np.frombuffer(noise, np.uint8)).reshape(2, width):
        x *= 1 - 2 * signs.astype(np.float32)
        half = 1
        while half < width:
            pairs = x.reshape(n, width // (2 * half), 2, half)
            sums, differences = pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]
            x = np.stack((sums, differences), axis=2)
            half *= 2
        x = x.reshape(n, width)
    return x


def _bits(dimension: int) -> int:
    """The number of bits: a power of two from 64 on."""
    return max(64, 1 << (dimension - 1).bit_length())


def _nearest_bits(
    query: np.ndarray, codes: np.ndarray, count: int, where: np.ndarray | None
) -> np.ndarray:
    """Positions of the `count` codes that differ in the fewest bits; of equals, the first ones."""
    most = 64 * len(query)
    distances = np.zeros(len(codes), np.uint16)
    for start in range(0, len(codes), _ROWS):
        block = distances[start : start + _ROWS]
        for word, column in zip(query, codes[start : start + _ROWS].T, strict=True):
            block += np.bitwise_count(column ^ word)
    if where is not None:
        distances[~where] = most + 1
    counts = np.cumsum(np.bincount(distances, minlength=most + 1)[: most + 1])
    count = min(count, int(counts[-1]))
    limit = np.searchsorted(counts, count)  # the distance of the last one
    places = np.flatnonzero(distances <= limit)
    return places[np.argsort(distances[places], kind="stable")[:count]]


def write(
    folder: pathlib.Path,
    vectors: Matrix,
    version: int,
    first: First,
    *,
    identity: str,
    wanted: float,
) -> None:
    """Makes the codes of all rows of the matrix, measures their recall and writes both."""
    dtype, columns = _layout(first, vectors.vectors.shape[1])
    codes: np.ndarray = np.zeros((len(vectors.rows), columns), dtype)
    for start in range(0, len(codes), _ENCODED):
        block = vectors.vectors[start : start + _ENCODED]
        codes[start : start + _ENCODED] = encoded(block, first)
    rows = Rows(vectors.rows, _by_column(codes, first))
    most = Codes(version, vectors.last_row, first, tuning.CANDIDATES[-1], {}, wanted, None, rows)
    near: dict[int, list[np.ndarray]] = {}  # all candidates, by the queries

    def search(queries: np.ndarray, k: int, width: int) -> Iterator[list[int]]:
        if id(queries) not in near:
            near[id(queries)] = most.search(queries, k)
        for query, candidates in zip(queries, near[id(queries)], strict=True):
            best = candidates[:width]
            best_vectors = vectors.vectors[np.searchsorted(vectors.rows, best)]
            values = nearest.similarities(query, best_vectors, similarity="cosine")
            yield best[nearest.best(values, best, k)].tolist()

    width, recalls, least = tuning.measured(
        search,
        vectors.rows,
        vectors.vectors,
        similarity="cosine",
        wanted=wanted,
        widths=tuning.CANDIDATES,
    )
    position = Position(identity, version, vectors.last_row, len(codes))
    facts: dict[str, Any] = {"first": first, "candidates": width, "wanted": wanted}
    facts |= {"least": least, "recall": min(recalls.values()), "recalls": recalls}
    batches = [(vectors.rows, codes)]
    matrix.write(folder, batches, position, columns, name="codes", dtype=dtype, facts=facts)


def read(folder: pathlib.Path, *, identity: str, dimension: int) -> Codes | str | None:
    """The codes; None if there are none; what is wrong with them, if they cannot be used."""
    opened = matrix.open_derived(folder, "codes", identity)
    if opened is None or isinstance(opened, str):
        return opened
    manifest, file = opened
    if "least" not in manifest:
        file.close()
        return f"{file.name} has the recall of an older version: `dmljax index tune` measures it"
    first = manifest["first"]
    dtype, columns = _layout(first, dimension)
    arrays = matrix.mapped(manifest, file, columns, dtype)
    if isinstance(arrays, str):
        return arrays
    rows = Rows(arrays.rows, _by_column(arrays.vectors, first))
    names = ("version", "last_row", "first", "candidates", "recalls", "wanted", "least")
    return Codes(**{name: manifest[name] for name in names}, rows=rows)


def _layout(first: First, dimension: int) -> tuple[type, int]:
    """The type and the number of columns of codes."""
    return (np.uint64, _bits(dimension) // 64) if isinstance(first, str) else (np.float32, first)


def _by_column(codes: np.ndarray, first: First) -> np.ndarray:
    """Bits in memory, column by column, as their comparison reads them; prefixes stay mapped."""
    return np.ascontiguousarray(codes.T).T if first == "bits" else codes
