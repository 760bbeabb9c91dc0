"""A graph for approximate search (HNSW of usearch), derived from the database.

The file is read only after its digest was verified, since usearch crashes on a damaged graph. It
holds unit vectors in float16 and others in float32; a search takes candidates from it and compares
them exactly. Its manifest records the wanted recall@10, those that were measured when it was built,
and the search width (ef) that reaches them.
"""

import os
import pathlib
from typing import Any, NamedTuple

import numpy as np

from dmljax.files import cores
from dmljax.files import writing as files
from dmljax.index import tuning
from dmljax.index.matrix import Matrix, Position, open_derived, write_manifest

_BATCH = 2000
_SELECTIVE = 0.05  # filters that leave a smaller share of the rows are searched exactly
_MOST_CANDIDATES = 4096


class Graph(NamedTuple):
    """Rows up to `last_row`, as they were at change `version`."""

    version: int
    last_row: int
    expansion: int
    recalls: dict[str, float]  # by the kind of query
    wanted: float
    least: float | None  # a query with a best hit below it is strange: see `tuning.least`
    nodes: Any  # usearch.index.Index

    @property
    def recall(self) -> float:
        """The recall@10 of the kind of queries for which it is lowest."""
        return min(self.recalls.values())

    @property
    def size(self) -> int:
        """The number of rows."""
        return len(self.nodes)

    def search(
        self, queries: np.ndarray, k: int, *, allowed: np.ndarray | None = None
    ) -> list[np.ndarray] | None:
        """Row numbers of candidates for the k best of each query, among the `allowed` rows.

        None if an exact search is the better way, since the filter leaves few rows.
        """
        if allowed is None:
            return self.nearest(queries, k + tuning.MORE)
        share = len(allowed) / max(self.size, 1)
        count = tuning.MORE + int(1.5 * k / max(share, 1e-9))
        if share < _SELECTIVE or count > _MOST_CANDIDATES:
            return None
        candidates = []
        for rows in self.nearest(queries, count):
            positions = np.minimum(np.searchsorted(allowed, rows), len(allowed) - 1)
            candidates.append(rows[allowed[positions] == rows])
        return candidates

    def nearest(self, queries: np.ndarray, k: int) -> list[np.ndarray]:
        """Row numbers of about the k best of each query."""
        k = min(k, len(self.nodes))
        if k == 0:
            return [np.zeros(0, np.int64) for _ in queries]
        self.nodes.expansion_search = tuning.width_for(self.expansion, k)
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


def refusal() -> ImportError | None:
    """What to install, if usearch cannot be imported."""
    try:
        _usearch()
    except ImportError:
        return ImportError(
            "approximate search needs usearch: pip install 'dmljax[index]' (exact search does not)"
        )
    return None


def _usearch() -> Any:
    """The package. JAX comes first: after usearch 2.26, jaxlib 0.10 cannot export a program."""
    import jax  # noqa: F401
    import usearch.index

    return usearch


def _empty(dimension: int, similarity: str) -> Any:
    return _usearch().index.Index(
        ndim=dimension,
        metric="cos" if similarity == "cosine" else "l2sq",
        dtype="f16" if similarity == "cosine" else "f32",
        connectivity=tuning.CONNECTIVITY,
        expansion_add=tuning.EXPANSION_ADD,
    )


def grown(
    start: Graph | None, matrix: Matrix, version: int, similarity: str, wanted: float
) -> Graph:
    """`start`, or an empty graph, with all rows of the matrix; its recall is measured."""
    rows, vectors = matrix.rows, matrix.vectors
    nodes = _empty(vectors.shape[1], similarity) if start is None else start.nodes
    first = 0 if start is None else int(np.searchsorted(rows, start.last_row, "right"))
    # Threads that fill an empty graph together can leave parts of it that nothing leads to.
    for i in range(first, len(rows), _BATCH):
        threads = 1 if len(nodes) < _BATCH else cores.count()
        nodes.add(rows[i : i + _BATCH].astype(np.uint64), vectors[i : i + _BATCH], threads=threads)

    def search(queries: np.ndarray, k: int, width: int) -> list[list[int]]:
        return [
            near.tolist()
            for near in Graph(0, 0, width, {}, wanted, None, nodes).nearest(queries, k)
        ]

    tuned = tuning.measured(search, rows, vectors, similarity=similarity, wanted=wanted)
    width, recalls, least = tuned
    return Graph(version, matrix.last_row, width, recalls, wanted, least, nodes)


def write(folder: pathlib.Path, graph: Graph, *, identity: str) -> None:
    """Writes the graph aside, and then the manifest that makes it the current one."""
    path = folder / f"graph-{graph.version}-{os.getpid()}.usearch"
    with files.atomic_writer(path, "wb") as file:
        file.write(graph.nodes.save())
    position = Position(identity, graph.version, graph.last_row, len(graph.nodes))
    names = ("expansion", "recall", "recalls", "wanted", "least")
    facts = {name: getattr(graph, name) for name in names} | {"usearch": _usearch().__version__}
    write_manifest(folder, "graph", path, position, facts)


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
    if refusal():
        return f"{file.name} needs usearch (pip install 'dmljax[index]')"
    version = _usearch().__version__
    if version.partition(".")[0] != manifest["usearch"].partition(".")[0]:
        return f"{file.name} is of usearch {manifest['usearch']}, not {version}"
    if "least" not in manifest:
        return f"{file.name} has the recall of an older version: `dmljax index tune` measures it"
    nodes = _empty(dimension, similarity)
    try:
        nodes.load(content)
    except (RuntimeError, ValueError) as error:
        return f"{file.name} cannot be opened: {error}"
    if nodes.ndim != dimension or len(nodes) != manifest["count"]:
        return f"{file.name} is not what its manifest says"
    names = ("version", "last_row", "expansion", "recalls", "wanted", "least")
    return Graph(**{name: manifest[name] for name in names}, nodes=nodes)
