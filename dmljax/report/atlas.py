"""A table for Embedding Atlas: places on a map, neighbors and images of millions of points.

embedding-atlas embeddings.parquet --x x --y y --neighbors neighbors --disable-projection
"""

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dmljax import retrieval
from dmljax.data.image_files import encoded
from dmljax.data.splits import Split
from dmljax.files.writing import atomic_writer
from dmljax.index import parquet as vector_files
from dmljax.report import projection

_NEIGHBORS, _CHUNK = 10, 1024  # rows whose images are in memory at once


def write(
    path: str | os.PathLike,
    embeddings: np.ndarray,
    split: Split,
    *,
    ids: Sequence[str],
    read_fn: Callable[[int], np.ndarray],
    seed: int = 0,
    devices: Sequence[Any] | None = None,
) -> int:
    """Writes the table completely or not at all, and returns its number of rows.

    A row has `id`, `label` (the name of the class), `x` and `y` (`projection.map_positions`),
    `neighbors` (a struct of `ids`, which are numbers of rows, and `distances`, 1 - cosine), `image`
    (a struct of `bytes` and `path`) and, where the split has them, `query` and `gallery`. Images
    without an embedding are left out. `read_fn(row)` gives the pixels of an image whose record is
    no encoded file.
    """
    arrow, parquet = vector_files.pyarrow()
    rows = np.flatnonzero(np.isfinite(embeddings).all(axis=1))
    vectors = np.asarray(embeddings[rows], np.float32)
    labels = split.labels[rows]
    places = projection.map_positions(vectors, labels, seed=seed, devices=devices).positions
    count = min(_NEIGHBORS, len(rows) - 1)
    near, similarities = np.zeros((len(rows), 0), np.int64), np.zeros((len(rows), 0))
    if count > 0:
        near, similarities = retrieval.nearest(
            vectors, k=count, similarity_fn=retrieval.cosine, devices=devices
        )
    integers, doubles = arrow.list_(arrow.int64()), arrow.list_(arrow.float64())
    fields = {
        "id": arrow.string(),
        "label": arrow.string(),
        "x": arrow.float64(),
        "y": arrow.float64(),
        "neighbors": arrow.struct([("ids", integers), ("distances", doubles)]),
        "image": arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())]),
    }
    marks = {name: getattr(split, name) for name in ("query", "gallery")}
    marks = {name: mark[rows] for name, mark in marks.items() if mark is not None}
    schema = arrow.schema([*fields.items(), *((name, arrow.bool_()) for name in marks)])
    with (
        atomic_writer(path, "wb") as file,
        parquet.ParquetWriter(file, schema, compression="zstd") as writer,
    ):
        for start in range(0, len(rows), _CHUNK):
            chunk = slice(start, start + _CHUNK)
            numbers = rows[chunk].tolist()
            distances = 1 - similarities[chunk].astype(np.float64)
            columns = {
                "id": [ids[row] for row in numbers],
                "label": [split.names[label] for label in labels[chunk]],
                "x": places[chunk, 0],
                "y": places[chunk, 1],
                "neighbors": [
                    {"ids": i, "distances": d}
                    for i, d in zip(near[chunk].tolist(), distances.tolist(), strict=True)
                ],
                "image": [
                    {"bytes": encoded(split, row, read_fn)[0], "path": None} for row in numbers
                ],
                **{name: mark[chunk] for name, mark in marks.items()},
            }
            writer.write_table(arrow.table(columns, schema=schema))
    return len(rows)
