"""Embeds a collection of images by workers of Ray, on one machine or a cluster.

Needs the extra `ray`. For known hosts, `dmljax embed --shard=I/N` writes the same folder without it
(docs/scale.md).
"""

import functools
import os
import pathlib
from typing import Any

from dmljax.bundle import collection
from dmljax.bundle.loading import Bundle, load
from dmljax.files import parts

_RETRIES = 3  # of a shard, after a worker died


def embed(
    bundle: str | os.PathLike,
    images: str | os.PathLike,
    out: str | os.PathLike,
    *,
    shards: int,
    prefix: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Embeds a folder or a Parquet list of images into `shards` parts; returns the state of `out`.

    Each part is a task of Ray that calls `collection.embed`, so the folder is bitwise the one of
    `dmljax embed --shard`. When a worker dies, Ray starts its task again, which continues with the
    first missing chunk; a repeated call skips complete parts. Bundle, images and `out` must be
    visible to all nodes. `options` are those of `ray.remote`, such as `num_cpus` and `num_gpus` of
    a task.

    >>> embed("photos.bundle", "list.parquet", "vectors", shards=8, num_gpus=1)  # doctest: +SKIP
    """
    import ray

    task = ray.remote(**{"max_retries": _RETRIES, **options})(_embed_shard)
    places = [str(pathlib.Path(path).absolute()) for path in (bundle, images, out)]
    ray.get([task.remote(*places, parts.Shard(i, shards), prefix) for i in range(shards)])
    return parts.read(out)


def _embed_shard(
    bundle: str, images: str, out: str, shard: parts.Shard, prefix: int | None
) -> None:
    collection.embed(_loaded(bundle), images, out, shard=shard, prefix=prefix)


@functools.lru_cache(maxsize=1)
def _loaded(path: str) -> Bundle:
    """Loads and compiles a bundle once in each worker, which runs many tasks."""
    return load(path)
