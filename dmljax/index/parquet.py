"""Items of an index as a Parquet file: columns id, metadata (JSON) and vector.

The vector is a fixed-size list of float32, as DuckDB, polars and LanceDB read it. The digest of the
model is in the schema's metadata under `dmljax`. A folder of parts (`files.parts`) is read as the
Parquet files of all its parts, in order.
"""

import json
import os
import pathlib
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dmljax.files import parts, reading
from dmljax.files import writing as files
from dmljax.index.base import Index
from dmljax.index.inputs import InvalidInput

_VECTOR_NAMES = ("vector", "embedding")
_BATCH = 10_000


class About(NamedTuple):
    """Facts about the vectors of a file. `model` and `similarity` are None if not stated."""

    model: str | None
    similarity: str | None
    dimension: int


class Batch(NamedTuple):
    """Rows of a file, as `Index.add` takes them."""

    ids: list[str]
    vectors: np.ndarray
    metadata: list[dict[str, Any]]


def write(
    path: str | os.PathLike,
    batches: Iterable[tuple[Any, ...]],
    *,
    about: About,
    texts: Sequence[str] = (),
    notes: Mapping[str, str] = types.MappingProxyType({}),
) -> int:
    """Writes batches of ids, further columns of text, and vectors; returns the number of rows.

    `texts` are the names of the further columns, and `notes` are metadata of the schema. The file
    is complete or does not exist.
    """
    pa, parquet = pyarrow()
    written = json.dumps({"format": 1, "model": about.model, "similarity": about.similarity})
    kind, count = pa.list_(pa.float32(), about.dimension), 0
    fields = [*((name, pa.string()) for name in ("id", *texts)), ("vector", kind)]
    schema = pa.schema(fields, metadata={"dmljax": written, **notes})
    with files.atomic_writer(path, "wb") as file, parquet.ParquetWriter(file, schema) as writer:
        for *columns, vectors in batches:
            flat = pa.array(np.ascontiguousarray(vectors, np.float32).reshape(-1))
            arrays = [pa.array(list(column), pa.string()) for column in columns]
            arrays.append(pa.FixedSizeListArray.from_arrays(flat, about.dimension))
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
            count += len(vectors)
    return count


def export(index: Index, path: str | os.PathLike) -> int:
    """Writes all items to a Parquet file, completely or not at all; returns their number."""
    batches = (
        (
            [item.id for item in items],
            [json.dumps(item.metadata, ensure_ascii=False) for item in items],
            np.stack([item.vector for item in items]),
        )
        for items in index.scan(_BATCH)
    )
    about = About(index.model, index.similarity, index.dimension)
    return write(path, batches, about=about, texts=["metadata"])


def about(path: str | os.PathLike) -> About:
    """Reads the model of a file or a folder of parts, its similarity and its dimension.

    The parts must be complete and intact.
    """
    if os.path.isdir(path):
        parts.read(path, verify=True)
    file = next(_files(path), None)
    if file is None:
        raise InvalidInput(
            f"{path} lacks vectors with ids: a bundle makes them (dmljax embed BUNDLE --images=...)"
        )
    schema, name = _schema(file)
    try:
        stated = reading.json_value((schema.metadata or {})[b"dmljax"])
        model, similarity = stated["model"], stated["similarity"]
    except (KeyError, ValueError, TypeError):
        model = similarity = None
    if hasattr(kind := schema.field(name).type, "list_size"):
        return About(model, similarity, kind.list_size)
    batch = next(read(file), None)
    return About(model, similarity, 0 if batch is None else batch.vectors.shape[1])


def read(path: str | os.PathLike, batch_size: int = _BATCH) -> Iterator[Batch]:
    """Yields the rows of a file, or of a folder of parts, in batches.

    Columns are `id` (text), `vector` or `embedding` (lists of numbers), and `metadata` (JSON or a
    struct). Without a column `metadata`, all other columns are metadata.
    """
    for file in _files(path):
        schema, name = _schema(file)
        others = other_columns(schema.names, "id", name)
        length, row = None, 0
        with pyarrow()[1].ParquetFile(file) as opened:
            for rows in opened.iter_batches(batch_size=batch_size):
                # Missing vectors have the length -1.
                lengths = rows[name].value_lengths().fill_null(-1).to_numpy()
                length = max(0, int(lengths[0])) if length is None and len(lengths) else length
                for i in np.flatnonzero(lengths != length)[:1]:
                    count = "no vector" if lengths[i] < 0 else f"{lengths[i]} numbers, not {length}"
                    place = f"the column {name!r}: row {row + i} (counted from 0)"
                    raise InvalidInput(f"{file}: {place} has {count}")
                vectors = rows[name].flatten().to_numpy(zero_copy_only=False)
                metadata = rows.select(others).to_pylist() if others else [{}] * len(rows)
                for i, item in enumerate(metadata) if "metadata" in others else ():
                    metadata[i] = item["metadata"]
                    if isinstance(metadata[i], str):
                        try:
                            metadata[i] = reading.json_value(metadata[i])
                        except ValueError:
                            place = f"the column 'metadata' is not JSON in row {row + i}"
                            raise InvalidInput(f"{file}: {place} (counted from 0)") from None
                yield Batch(rows["id"].to_pylist(), vectors.reshape(len(rows), -1), metadata)
                row += len(rows)


def other_columns(names: Sequence[str], *known: str) -> list[str]:
    """Returns the names of further columns, without the index that pandas writes."""
    return [x for x in names if x not in known and not x.startswith("__index_level_")]


def _files(path: str | os.PathLike) -> Iterator[pathlib.Path]:
    """Yields a file, or the Parquet files of all parts."""
    if not os.path.isdir(path):
        yield pathlib.Path(path)
        return
    for part in parts.read(path)["folders"]:
        for name in sorted(part["files"]):
            if name.endswith(".parquet"):
                yield pathlib.Path(path) / part["folder"] / name


def _schema(path: pathlib.Path) -> tuple[Any, str]:
    """Returns the schema of a file, and the name of its column of vectors."""
    pa, parquet = pyarrow()
    try:
        schema = parquet.read_schema(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise InvalidInput(f"{path} is not Parquet: {error}") from None
    kinds = {field.name: field.type for field in schema}
    name = next((name for name in _VECTOR_NAMES if name in kinds), "")
    is_list = pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list
    if kinds.get("id") not in (pa.string(), pa.large_string()) or not any(
        test(kinds.get(name, pa.null())) for test in is_list
    ):
        columns = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
        raise InvalidInput(
            f"{path} needs the columns id (text) and vector or embedding (lists of numbers); it "
            f"has {columns}"
        )
    return schema, name


def pyarrow() -> tuple[Any, Any]:
    """Imports pyarrow and pyarrow.parquet."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ImportError("Parquet files need pyarrow: pip install 'dmljax[parquet]'") from None
    return pyarrow, parquet
