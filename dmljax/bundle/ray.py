"""A bundle embeds a Ray Data set: workers that come and go, restartable by part, exactly once.

Needs the extra `ray` (0.6 GB installed). For a fixed list on known hosts `dmljax embed --shard=I/N`
does the same without it (docs/scale.md). The folder that is written is the same: see `files.parts`.
"""

import os
import pathlib
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from dmljax.bundle import collection as collections
from dmljax.bundle.loading import load
from dmljax.files import cores, parts

_WRITTEN = "written"  # what Ray writes, before it is checked
_ROWS = 1024  # rows of a block that this module makes from a list


def embed(
    bundle_path: str | os.PathLike,
    images: str | os.PathLike | Callable[[parts.Shard], Any],
    out: str | os.PathLike,
    *,
    shards: int,
    name: str | None = None,
    actors: int = 1,
    gpus: float = 0,
    batch_size: int = 256,
) -> dict[str, Any]:
    """Embeds images into the parts of the folder `out`, by actors of Ray; the manifest.

    `images` is a folder or a Parquet list, as `collection.open_collection` takes it, or a function
    that returns the Ray Data set of a part, with the columns `id` (unique text) and either `path`
    or `bytes` (encoded images). With a function, `name` says what it is of, because a folder of
    parts is never continued with other images. Bundle and images must be visible on all nodes.

    Each part is one job of Ray. Ray starts an actor that dies again and repeats its batch; then
    every id of the part must be there exactly once, or the part fails. Parts that are complete are
    skipped, so a repeated call continues. Images that cannot be read are listed in `left_out.jsonl`
    of their part. `gpus` is the number for each actor; below 1 they share the memory of one.

    >>> embed("photos.bundle", "list.parquet", "vectors", shards=8, actors=4)  # doctest: +SKIP
    """
    import ray.data

    bundle = load(bundle_path)
    if callable(images):
        if not name:
            raise ValueError("name= must say which images a function returns")
        dataset_fn, total, digest = images, None, name
    else:
        source = collections.open_collection(images)
        dataset_fn, total, digest = _listed(source), source.count, source.digest
        if shards > source.count:
            raise ValueError(f"shards={shards}: there are only {source.count:,} images")
    task = {
        "model": bundle.digest,
        "dimension": bundle.dimension,
        "similarity": bundle.similarity,
        "collection": digest,
        "engine": "ray",
    }
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    for index in range(shards):
        shard = parts.Shard(index, shards)
        with parts.claimed(out, shard, task) as folder:
            if parts.is_complete(folder):
                continue
            for path in folder.iterdir():  # a part is restarted as a whole
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            dataset = dataset_fn(shard)
            count = dataset.count() if total is None else len(shard.rows(total))
            written = folder / _WRITTEN
            dataset.map_batches(
                _Embedder,
                fn_constructor_args=(str(pathlib.Path(bundle_path).absolute()),),
                batch_format="pyarrow",
                batch_size=batch_size,
                compute=ray.data.ActorPoolStrategy(size=actors),
                num_gpus=gpus or None,
                max_restarts=2,
                max_task_retries=3,
                runtime_env={"env_vars": _variables(gpus)},
            ).write_parquet(str(written.absolute()))
            left_out = _collect(folder, written, count, model=bundle)
            rows = range(count) if total is None else shard.rows(total)
            parts.finish(folder, shard, rows=rows, left_out=left_out)
        parts.complete(out)
    return parts.read(out)


def _variables(gpus: float) -> dict[str, str]:
    """The environment of an actor. Those that share a GPU must not take all of its memory."""
    if 0 < gpus < 1:
        return {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.9 * gpus:.2f}"}
    return {}


def _listed(source: collections.Collection) -> Callable[[parts.Shard], Any]:
    """The Ray Data set of the paths of a part."""

    def dataset(shard: parts.Shard) -> Any:
        import pyarrow as pa
        import ray.data

        rows = shard.rows(source.count)
        tables = []
        for start in range(rows.start, rows.stop, _ROWS):
            images = source.read_fn(range(start, min(start + _ROWS, rows.stop)))
            columns = {"id": [x.id for x in images], "path": [x.path for x in images]}
            tables.append(pa.table(columns))
        return ray.data.from_arrow(tables)

    return dataset


class _Embedder:
    """An actor of Ray: it loads and compiles the bundle once."""

    def __init__(self, bundle_path: str):
        self._bundle = load(bundle_path)
        self._pool = ThreadPoolExecutor(cores.count())

    def __call__(self, table: Any) -> Any:
        """A table of id, vector (a list of one size, which all readers know) and problem."""
        import pyarrow as pa

        column = "path" if "path" in table.column_names else "bytes"
        ids, cells = table["id"].to_pylist(), table[column].to_pylist()
        images = [collections.Image(*row) for row in zip(ids, cells, strict=True)]
        ids, vectors, left_out = collections.embedded(self._bundle, images, 0, self._pool)
        dimension = self._bundle.dimension
        absent = np.full((len(left_out), dimension), np.nan, np.float32)
        flat = pa.array(np.concatenate([vectors, absent]).reshape(-1))
        columns: Mapping[str, Any] = {
            "id": pa.array([*ids, *(x for x, _ in left_out)], pa.string()),
            "vector": pa.FixedSizeListArray.from_arrays(flat, dimension),
            "problem": pa.array([""] * len(ids) + [x for _, x in left_out], pa.string()),
        }
        return pa.table(columns)


def _collect(folder: pathlib.Path, written: pathlib.Path, count: int, *, model: Any) -> int:
    """Writes the files of a part from the files of Ray, and checks that every id is there once.

    Returns the number of images that were left out.
    """
    from pyarrow import parquet

    names: set[str] = set()
    rows = 0
    for i, path in enumerate(sorted(written.glob("*.parquet"))):
        table = parquet.ParquetFile(path).read()
        ids, problems = table["id"].to_pylist(), table["problem"].to_pylist()
        vectors = table["vector"].combine_chunks().flatten().to_numpy()
        vectors = vectors.reshape(len(ids), model.dimension)
        names.update(ids)
        rows += len(ids)
        readable = np.array([not problem for problem in problems], bool)
        left_out = [(x, y) for x, y in zip(ids, problems, strict=True) if y]
        kept = [x for x, y in zip(ids, problems, strict=True) if not y]
        target = folder / f"{i:012d}.parquet"
        metadata = [collections.metadata_of(x) for x in kept]
        collections.write_chunk(target, kept, metadata, vectors[readable], left_out, model=model)
    if not rows == len(names) == count:
        raise ValueError(
            f"{folder}: {rows:,} rows with {len(names):,} ids were written for {count:,} images: "
            "ids must be unique; otherwise run the same call again"
        )
    shutil.rmtree(written)
    return collections.write_left_out(folder)
