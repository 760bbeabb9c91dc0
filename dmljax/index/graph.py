"""A graph for approximate search (HNSW of usearch), derived from the database.

The file is read only after its digest was verified, since usearch crashes on a damaged graph. It
holds unit vectors in float16 and others in float32; a search takes candidates from it and compares
them exactly. Its manifest records the recall@10 that was measured when it was built, and the search
width (ef) that reaches it.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from dmljax.files import writing as files
from dmljax.index import nearest
from dmljax.index.matrix import open_derived, write_manifest

__all__ = ["LEAST_RECALL", "Graph", "add", "empty", "installed", "measure", "read", "write"]

LEAST_RECALL = 0.95  # a graph that does not reach it is not used
_TARGET_RECALL = 0.98
_CONNECTIVITY, _EXPANSION_ADD = 16, 128
_EXPANSIONS = (16, 32, 64, 128, 256, 512)
_QUERIES = 1000


class Graph(NamedTuple):
    """Rows up to `last_row`, as they were at change `version`."""

    version: int
    last_row: int
    expansion: int
    recall: float
    nodes: Any  # usearch.index.Index

    def search(self, queries: np.ndarray, k: int) -> list[np.ndarray]:
        """Row numbers of about the k best of each query."""
        k = min(k, len(self.nodes))
        if k == 0:
            return [np.zeros(0, np.int64) for _ in queries]
        self.nodes.expansion_search = max(self.expansion, k + k // 2)
        matches = self.nodes.search(queries, k, threads=1)
        if len(queries) == 1:
            return [np.asarray(matches.keys, np.int64).ravel()]
        counts = np.asarray(matches.counts)
        keys = np.asarray(matches.keys, np.int64)
        return [row[:count] for row, count in zip(keys, counts, strict=True)]

    def delete(self, rows: np.ndarray) -> None:
        """Leaves rows out from now on."""
        rows = rows[rows <= self.last_row].astype(np.uint64)
        rows = rows[np.atleast_1d(self.nodes.contains(rows))] if len(rows) else rows
        if len(rows):
            self.nodes.remove(rows)


def installed() -> bool:
    """Whether usearch can be imported."""
    try:
        import usearch.index  # noqa: F401
    except ImportError:
        return False
    return True


def empty(dimension: int, similarity: str) -> Any:
    """A graph without nodes."""
    try:
        from usearch.index import Index
    except ImportError:
        raise ImportError(
            "approximate search needs usearch: pip install 'dmljax[index]' (exact search does not)"
        ) from None
    return Index(
        ndim=dimension,
        metric="cos" if similarity == "cosine" else "l2sq",
        dtype="f16" if similarity == "cosine" else "f32",
        connectivity=_CONNECTIVITY,
        expansion_add=_EXPANSION_ADD,
    )


def add(nodes: Any, batches: Iterable[tuple[np.ndarray, np.ndarray]]) -> None:
    """Adds rows and their vectors."""
    for rows, vectors in batches:
        nodes.add(rows.astype(np.uint64), vectors)


def measure(
    nodes: Any, rows: np.ndarray, vectors: np.ndarray, similarity: str
) -> tuple[int, float]:
    """The smallest search width that reaches a recall@10 of 0.98, or the largest one; its recall.

    Queries are up to 1,000 stored vectors, which do not count among their own neighbors.
    """
    chosen = np.linspace(0, len(rows) - 1, min(_QUERIES, len(rows))).astype(np.int64)
    queries, k = vectors[chosen], min(10, len(rows) - 1)
    if k < 1:
        return _EXPANSIONS[0], 1.0
    truth = []
    candidates = nearest.candidates(queries, vectors, k + 1, similarity=similarity)
    for query, places in zip(queries, candidates, strict=True):
        values = nearest.similarities(query, vectors[places], similarity=similarity)
        truth.append(rows[places[nearest.best(values, rows[places], k + 1)]])
    for expansion in _EXPANSIONS:
        results = Graph(0, 0, expansion, 0.0, nodes).search(queries, k + 1)
        shares = [
            len((set(exact.tolist()) & set(near.tolist())) - {row}) / (k + 1 - (row in exact))
            for row, exact, near in zip(rows[chosen].tolist(), truth, results, strict=True)
        ]
        recall = float(np.mean(shares))
        if recall >= _TARGET_RECALL:
            break
    return expansion, recall


def write(folder: pathlib.Path, graph: Graph, *, identity: str) -> None:
    """Writes the graph aside, and then the manifest that makes it the current one."""
    import usearch

    path = folder / f"graph-{graph.version}-{os.getpid()}.usearch"
    with files.atomic_writer(path, "wb") as file:
        file.write(graph.nodes.save())
    write_manifest(
        folder,
        "graph",
        path,
        {
            "count": len(graph.nodes),
            "version": graph.version,
            "last_row": graph.last_row,
            "identity": identity,
            "expansion": graph.expansion,
            "recall": graph.recall,
            "usearch": usearch.__version__,
        },
    )


def read(
    folder: pathlib.Path, *, identity: str, dimension: int, similarity: str
) -> Graph | str | None:
    """The graph; None if there is none; what is wrong with it, if it cannot be used."""
    opened = open_derived(folder, "graph", identity)
    if opened is None or isinstance(opened, str):
        return opened
    manifest, file = opened
    with file:
        content = file.read()
    if not installed():
        return f"{file.name} needs usearch (pip install 'dmljax[index]')"
    import usearch

    if usearch.__version__.partition(".")[0] != manifest["usearch"].partition(".")[0]:
        return f"{file.name} is of usearch {manifest['usearch']}, not {usearch.__version__}"
    nodes = empty(dimension, similarity)
    try:
        nodes.load(content)
    except (RuntimeError, ValueError) as error:
        return f"{file.name} cannot be opened: {error}"
    if nodes.ndim != dimension or len(nodes) != manifest["count"]:
        return f"{file.name} is not what its manifest says"
    version, last_row = manifest["version"], manifest["last_row"]
    return Graph(version, last_row, manifest["expansion"], manifest["recall"], nodes)
