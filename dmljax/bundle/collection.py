"""Embeddings of a collection of any size, in parts that processes write independently.

A collection is a folder of images, or a Parquet file with a column `path` and perhaps `id`. A
list is read by row groups: a process holds one row group, however long the list is. Further columns
are metadata of an index.

The files of a part are `000000016384.parquet`, named by the first row of their chunk, with columns
`id`, `metadata` and `vector`, as `dmljax index create --import` reads them. Each is written
atomically, so the existing files are the progress. Images that cannot be embedded have no row;
`left_out.jsonl` names them.
"""

import collections
import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import types
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from dmljax.bundle.loading import Bundle, load
from dmljax.data import decode, image_folders
from dmljax.files import machine, parts, reading
from dmljax.files import writing as files
from dmljax.index import inputs
from dmljax.index import parquet as vector_files
from dmljax.index.fill import metadata_of

CHUNK = 16_384
LEFT_OUT = "left_out.jsonl"


class Image(NamedTuple):
    """The id of an image, its file or the bytes of its file, and further columns of a list."""

    id: str
    path: str | bytes
    metadata: Mapping[str, Any] = types.MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Collection:
    """Images in a fixed order. `digest` tells two collections apart.

    `skipped_columns` are columns of a list that cannot be metadata. `path_note` says which folder
    relative paths refer to.
    """

    count: int
    digest: str
    read_fn: Callable[[range], list[Image]]
    skipped_columns: Sequence[str] = ()
    path_note: str = ""


def images_below(folder: str | os.PathLike) -> list[Image]:
    """Returns the images below a folder, sorted by path; ids are relative paths in NFC."""
    root = pathlib.Path(folder)
    paths = image_folders.image_paths(root)
    names = [pathlib.Path(path).relative_to(root).as_posix() for path in paths]
    return [Image(unicodedata.normalize("NFC", x), p) for x, p in zip(names, paths, strict=True)]


def _folder(root: str | os.PathLike) -> Collection:
    images = images_below(root)
    if not images:
        suffixes = " ".join(decode.SUFFIXES)
        raise FileNotFoundError(f"{root} contains no images; known suffixes are {suffixes}")
    digest = hashlib.sha256(json.dumps([image.id for image in images]).encode()).hexdigest()
    return Collection(len(images), digest, lambda rows: images[rows.start : rows.stop])


def _list(path: str | os.PathLike) -> Collection:
    """Opens a Parquet file as a collection. Relative paths refer to the folder of the file."""
    pa, parquet = vector_files.pyarrow()
    try:
        file = parquet.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(f"{path} is not Parquet: {error}") from None
    names = file.schema_arrow.names
    if "path" not in names or not file.metadata.num_rows:
        raise ValueError(
            f"{path} needs rows with a column path, and may have id; it has {', '.join(names)}"
        )
    id_column = "id" if "id" in names else "path"
    others = vector_files.other_columns(names, "path", "id")
    fields = [name for name in others if _is_scalar(file.schema_arrow.field(name).type)]
    columns = list(dict.fromkeys(["path", id_column, *fields]))
    counts = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
    bounds = list(itertools.accumulate(counts, initial=0))
    folder = pathlib.Path(path).parent

    def read(rows: range) -> list[Image]:
        inside = [a < rows.stop and rows.start < b for a, b in itertools.pairwise(bounds)]
        groups = np.flatnonzero(inside).tolist()
        table = file.read_row_groups(groups, columns=columns)
        table = table.slice(rows.start - bounds[groups[0]], len(rows))
        if table["path"].null_count or table[id_column].null_count:
            place = f"rows {rows.start} to {rows.stop}"
            raise ValueError(f"{path}: {place} contain a row without path or id")
        return [
            Image(
                str(row[id_column]),
                str(folder / str(row["path"])),
                {name: files.finite(row[name]) for name in fields},
            )
            for row in table.to_pylist()
        ]

    skipped = [name for name in others if name not in fields]
    path_note = f"relative paths in {path} begin at its folder"
    return Collection(bounds[-1], _footer_digest(path), read, skipped, path_note)


def _is_scalar(kind: Any) -> bool:
    """Tells whether values of a type of Arrow are text, numbers or bools."""
    is_kind = vector_files.pyarrow()[0].types
    tests = is_kind.is_string, is_kind.is_large_string, is_kind.is_integer, is_kind.is_floating
    if is_kind.is_dictionary(kind):
        kind = kind.value_type
    return any(test(kind) for test in (*tests, is_kind.is_boolean, is_kind.is_null))


def _footer_digest(path: str | os.PathLike) -> str:
    """Returns the SHA-256 of a Parquet footer: schema, row groups, their offsets and statistics."""
    with open(path, "rb") as file:
        file.seek(-8, os.SEEK_END)
        length = int.from_bytes(file.read(4), "little")
        file.seek(-8 - length, os.SEEK_END)
        return hashlib.sha256(file.read()).hexdigest()


def open_collection(path: str | os.PathLike) -> Collection:
    """Opens a folder of images, or a Parquet list with its further columns."""
    if os.path.isdir(path):
        return _folder(path)
    if os.path.isfile(path):
        return _list(path)
    raise FileNotFoundError(f"--images={path} is neither a folder nor a Parquet file")


def embed(
    bundle: str | os.PathLike | Bundle,
    images: str | os.PathLike,
    out: str | os.PathLike,
    *,
    shard: parts.Shard = parts.Shard(0, 1),  # noqa: B008  (immutable)
    chunk: int = CHUNK,
    prefix: int | None = None,
) -> dict[str, Any]:
    """Embeds one part of the images of a folder or a Parquet list, and returns facts of the part.

    With `prefix`, one of the bundle's, it writes the first `prefix` numbers of each embedding as
    unit vectors.

    Repeat a killed call: it continues with the first missing chunk. Batches begin at the same rows
    for every number of parts, and are padded to one size, so the vectors do not depend on the
    number of parts.

    >>> embed("photos.bundle", "list.parquet", "vectors", shard=parts.Shard(0, 8))  # doctest: +SKIP
    """
    bundle = bundle if isinstance(bundle, Bundle) else load(bundle)
    collection = open_collection(images)
    bundle.check_prefix(prefix)
    if shard.count > collection.count:
        raise ValueError(f"--shard={shard}: the collection has {collection.count:,} images")
    task = {
        "model": bundle.digest,
        "dimension": prefix or bundle.dimension,
        "similarity": bundle.similarity,
        "batch_size": bundle.batch_sizes[-1],
        "collection": collection.digest,
        "count": collection.count,
        "chunk": chunk,
    }
    rows = shard.rows(collection.count)
    with parts.claimed(out, shard, task) as folder:
        if not parts.is_complete(folder):
            with ThreadPoolExecutor(machine.core_count()) as pool:
                for start in range(rows.start, rows.stop, chunk):
                    path = folder / f"{start:012d}.parquet"
                    if not path.exists():
                        selected = collection.read_fn(range(start, min(start + chunk, rows.stop)))
                        ids, vectors, left_out = embedded(bundle, selected, start, pool, prefix)
                        by_id = {x.id: metadata_of(x.id, x.metadata) for x in selected}
                        metadata = [by_id[name] for name in ids]
                        write_chunk(path, ids, metadata, vectors, left_out, model=bundle)
            parts.finish(folder, rows=rows, left_out=write_left_out(folder))
    state = parts.state(out)
    facts = next(part for part in state["folders"] if part["folder"] == shard.folder)
    return {**facts, "folder": str(folder), "missing": state["missing"]}


def embedded(
    bundle: Bundle,
    images: Sequence[Image],
    first_row: int,
    pool: ThreadPoolExecutor,
    prefix: int | None = None,
) -> tuple[list[str], np.ndarray, list[tuple[str, str]]]:
    """Returns ids and vectors of the images that can be embedded, and problems of the others.

    `first_row` decides where the batches begin. Threads decode two batches ahead.
    """
    size, count = bundle.batch_sizes[-1], len(images)
    offset = first_row % size
    bounds = [0, *range(size - offset, count, size), count]
    batches = [range(*pair) for pair in itertools.pairwise(bounds)]
    ids: list[str] = []
    vectors = [np.zeros((0, prefix or bundle.dimension), np.float32)]
    left_out: list[tuple[str, str]] = []

    def submit(rows: range) -> list[Future]:
        return [pool.submit(_prepare, bundle, images[i]) for i in rows]

    pending = collections.deque(map(submit, batches[:2]))
    for number, rows in enumerate(batches):
        pending.extend(map(submit, batches[number + 2 : number + 3]))
        batch = np.zeros((size, *bundle.input_shape), np.uint8)
        slots = []
        for i, future in zip(rows, pending.popleft(), strict=True):
            if isinstance(result := future.result(), str):
                left_out.append((images[i].id, result))
            else:
                slots.append((offset + i) % size)
                batch[slots[-1]] = result
                ids.append(images[i].id)
        if slots:
            vectors.append(bundle.embed_prepared(batch, prefix=prefix)[slots])
    x = np.concatenate(vectors)
    where = np.isfinite(x).all(axis=1)
    wrong = itertools.compress(ids, ~where)
    left_out += [(name, "its embedding has NaN or infinity") for name in wrong]
    return list(itertools.compress(ids, where)), x[where], left_out


def _prepare(bundle: Bundle, image: Image) -> np.ndarray | str:
    try:
        inputs.check_metadata([dict(image.metadata)], 1)
        return bundle.prepare(image.path)
    except (ValueError, OSError) as error:
        return " ".join(str(error).split()).replace("metadata of number 0", "its metadata")


def write_chunk(
    path: pathlib.Path,
    ids: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    vectors: np.ndarray,
    left_out: Sequence[tuple[str, str]],
    *,
    model: Bundle,
) -> None:
    """Writes ids, metadata and vectors to a Parquet file, completely or not at all."""
    about = vector_files.About(model.digest, model.similarity, vectors.shape[1])
    notes = {LEFT_OUT: json.dumps(left_out)}
    texts = [json.dumps(item, ensure_ascii=False) for item in metadata]
    vector_files.write(path, [(ids, texts, vectors)], about=about, texts=["metadata"], notes=notes)


def write_left_out(folder: pathlib.Path) -> int:
    """Lists the images of a part that could not be read, and returns their count."""
    _, parquet = vector_files.pyarrow()
    lines = []
    for path in sorted(folder.glob("*.parquet")):
        metadata = parquet.read_schema(path).metadata
        for name, problem in reading.json_value(metadata[LEFT_OUT.encode()]):
            lines.append(json.dumps({"id": name, "problem": problem}) + "\n")
    if lines:
        files.write_text(folder / LEFT_OUT, "".join(lines))
    return len(lines)
