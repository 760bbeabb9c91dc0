"""Exact ranks where some items do not count for some queries."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from dmljax.retrieval.search import Ranks
from dmljax.retrieval.tiles import Embeddings, Labels, SimilarityFn, dtype_of, euclidean

__all__ = ["ranks_apart"]

_STRIP = 1 << 24  # similarities held at once


def ranks_apart(
    embeddings: Embeddings,
    labels: Labels,
    groups: Int[np.ndarray, "q"],
    *,
    gallery: Embeddings | None = None,
    gallery_labels: Labels | None = None,
    gallery_groups: Int[np.ndarray, "n"] | None = None,
    similarity_fn: SimilarityFn = euclidean,
) -> Iterator[Ranks]:
    """`ranks` without the items of the query's own group, positives and negatives; -1 is no group.

    A query all of whose positives are in its group does not come. Rows of similarities are sorted
    strip by strip on the host.
    """
    own = gallery is None
    if own != (gallery_groups is None) or own != (gallery_labels is None):
        raise ValueError(
            "gallery, gallery_labels and gallery_groups go together: give all, or none"
        )
    x, labels, groups = (np.asarray(a) for a in (embeddings, labels, groups))
    y, others, theirs = (x, labels, groups) if own else (gallery, gallery_labels, gallery_groups)
    y, others, theirs = (np.asarray(a) for a in (y, others, theirs))
    for name, array, size in (("groups", groups, len(x)), ("gallery_groups", theirs, len(y))):
        if array.shape != (size,):
            raise ValueError(f"{name} have shape {array.shape}, but there are {size} embeddings")
    for name, array in (("embeddings", x), ("gallery", y)):
        if not np.isfinite(array).all():
            raise ValueError(f"{name} are not all finite: find where the net diverged")
    dtype = dtype_of(x)
    mean, spread = y.mean(axis=0, dtype=np.float64), float(y.std(dtype=np.float64))
    # On a grid of a power of two, whole numbers stay whole, and exact ties stay exact.
    grid = 2.0 ** np.ceil(np.log2(spread)) if spread > 0 else 1.0
    centre = jnp.asarray((np.round(mean / grid) * grid).astype(dtype))
    prepare = jax.jit(similarity_fn)
    columns, offsets = prepare(jnp.asarray(y.astype(dtype)), centre)

    @jax.jit
    def similarities(rows):
        rows, ours = prepare(rows, centre)
        products = jnp.matmul(rows, columns.T, precision=jax.lax.Precision.HIGHEST)
        return products + (ours[:, None] + offsets[None])

    step = min(len(x), max(1, _STRIP // len(y)))
    for start in range(0, len(x), step):
        rows = np.arange(start, min(start + step, len(x)))
        part = np.zeros((step, x.shape[1]), dtype)  # of one size, to compile once
        part[: len(rows)] = x[rows]
        found = np.asarray(similarities(jnp.asarray(part)))[: len(rows)]
        out = (groups[rows, None] == theirs[None]) & (groups[rows, None] >= 0)
        if own:
            out[np.arange(len(rows)), rows] = True
        same = labels[rows, None] == others[None]
        positives = -np.sort(-np.where(same & ~out, found, -np.inf), axis=1)
        count = (same & ~out).sum(axis=1)
        positives = positives[:, : max(1, count.max())]
        negatives = np.sort(np.where(same | out, -np.inf, found), axis=1)
        ahead = np.stack(
            [len(y) - np.searchsorted(n, p) for n, p in zip(negatives, positives, strict=True)]
        )
        place = np.arange(1, positives.shape[1] + 1)
        ranks = np.where(place <= count[:, None], ahead + place, 0)
        yield Ranks(rows[count > 0], ranks[count > 0])
