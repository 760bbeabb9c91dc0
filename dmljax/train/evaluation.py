"""Embeds a split and scores it. Knows functions and numbers, no nets and no config."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from dmljax import metrics
from dmljax.data import pipeline
from dmljax.data.splits import Split
from dmljax.train.devices import Shardings, prefetch

__all__ = ["embed", "knn_accuracy", "score"]


def embed(
    embed_fn: Callable[..., Any],
    split: Split,
    *,
    transform_fn: Callable,
    batch_size: int,
    shards: Shardings,
    cache: bool | dict[int, np.ndarray] = False,
    workers: int = 0,
    unreadable: str = "raise",
    skipped: collections.Counter[str] | None = None,
) -> Any:
    """`embed_fn(images)` (an array or a tree of them, `[b ...]`) of every image, in order, float32.

    `embed_fn` gets uint8 batches of one size on the devices. With `unreadable='skip'`, the rows of
    images that cannot be read are NaN. Such images are counted in `skipped`; a name that it already
    contains is not logged again.
    """
    batch_size = -(-batch_size // shards.size) * shards.size
    with pipeline.evaluation(
        split,
        transform_fn=transform_fn,
        batch_size=batch_size,
        host=jax.process_index(),
        hosts=jax.process_count(),
        cache=cache,
        workers=workers,
        unreadable=unreadable,
        skipped=skipped,
    ) as batches:
        out = None
        for batch in prefetch(batches, shards.rows):
            found = _fetch({"out": embed_fn(batch["images"]), "where": batch["where"]}, shards)
            rows = _fetch(batch["indices"], shards)
            real = rows >= 0
            if not all(np.isfinite(a[found["where"]]).all() for a in jax.tree.leaves(found["out"])):
                raise FloatingPointError(
                    "embeddings are not finite: what the net has learned is not, or not normalised "
                    "as it was in training"
                )
            found["out"] = jax.tree.map(
                lambda a, where=found["where"]: np.where(_like(where, a), a, np.nan), found["out"]
            )
            if out is None:
                out = jax.tree.map(
                    lambda a: np.empty((len(split), *a.shape[1:]), np.float32), found["out"]
                )
            for whole, part in zip(
                jax.tree.leaves(out), jax.tree.leaves(found["out"]), strict=True
            ):
                whole[rows[real]] = part[real]
    return out


def _like(where: np.ndarray, a: np.ndarray) -> np.ndarray:
    return where.reshape(-1, *(1,) * (a.ndim - 1))


def _fetch(tree: Any, shards: Shardings) -> Any:
    """Global arrays to numpy, on every host."""
    if jax.process_count() > 1:
        tree = _gather(shards.everywhere)(tree)
    return jax.device_get(tree)


@functools.cache
def _gather(everywhere: jax.sharding.Sharding) -> Callable:
    return jax.jit(lambda tree: tree, out_shardings=everywhere)


def score(
    embeddings: np.ndarray,
    split: Split,
    *,
    ks: Sequence[int] = (1, 2, 4, 8),
    clustering: bool = True,
    seeds: Sequence[int] = (0, 1, 2),
    similarity_fn: Callable | None = None,
    devices: Sequence[Any] | None = None,
) -> dict[str, float]:
    """Retrieval scores by the split's protocol, and clustering of all its images.

    Images that could not be read (rows of NaN) count nowhere, but are counted in 'unreadable'.
    """
    readable = np.isfinite(embeddings).all(axis=1)
    query = readable if split.query is None else readable & split.query
    gallery = None if split.gallery is None else readable & split.gallery
    search: dict[str, Any] = {"devices": devices}
    search |= {} if similarity_fn is None else {"similarity_fn": similarity_fn}
    items = int(query.sum()) - 1 if gallery is None else int(gallery.sum())
    ks = [k for k in ks if k <= items] or [1]
    if gallery is not None:
        search |= {"gallery": embeddings[gallery], "gallery_labels": split.labels[gallery]}
    if split.groups is not None:
        search["groups"] = split.groups[query]
        if gallery is not None:
            search["gallery_groups"] = split.groups[gallery]
    scores = metrics.retrieval(embeddings[query], split.labels[query], ks=ks, **search)
    if clustering:
        points, labels = embeddings[readable], split.labels[readable]
        scores |= metrics.clustering(points, labels, seeds=seeds, devices=devices)
    if missing := int((~readable).sum()):
        scores["unreadable"] = missing
    return scores


def knn_accuracy(
    embeddings: np.ndarray,
    labels: np.ndarray,
    gallery: np.ndarray,
    gallery_labels: np.ndarray,
    *,
    k: int,
) -> float:
    """Share whose k nearest in the gallery vote for their label; the nearest breaks ties."""
    from dmljax import retrieval

    near, _ = retrieval.nearest(embeddings, gallery, k=k)
    votes = gallery_labels[near]
    same = (votes[:, :, None] == votes[:, None, :]).sum(axis=2)
    winner = votes[np.arange(len(votes)), np.argmax(same, axis=1)]  # the first of the most frequent
    return float(np.mean(winner == labels))
