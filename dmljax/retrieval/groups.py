"""Exact ranks among the items outside of each query's group, as re-identification needs them.

In re-identification, a query ignores the images of the same person from the same camera.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dmljax.retrieval import inputs, sharding, tiles
from dmljax.retrieval.inputs import Embeddings, Labels
from dmljax.retrieval.layout import Ranks
from dmljax.retrieval.similarity import SimilarityFn, euclidean

__all__ = ["ranks_outside_groups"]


def ranks_outside_groups(
    embeddings: Embeddings,
    labels: Labels,
    groups: Int[np.ndarray, "q"],
    *,
    gallery: Embeddings | None = None,
    gallery_labels: Labels | None = None,
    gallery_groups: Int[np.ndarray, "n"] | None = None,
    similarity_fn: SimilarityFn = euclidean,
    share: tuple[int, int] | None = None,
) -> Iterator[Ranks]:
    """`ranks` among the items outside of each query's group; -1 is no group.

    A query whose positives are all in its group is in no block. One device computes strips of
    similarities, and the host sorts them.

    >>> embeddings, labels = np.array([[0.0], [1.0], [2.0], [4.0]]), np.array([0, 1, 0, 0])
    >>> blocks = retrieval.ranks_outside_groups(embeddings, labels, np.array([7, -1, 7, -1]))
    >>> next(blocks).ranks.tolist()  # of queries 0, 2 and 3; 0 and 2 share a group
    [[2, 0], [2, 0], [1, 3]]
    """
    within = gallery is None  # the embeddings search themselves
    if within != (gallery_groups is None) or within != (gallery_labels is None):
        raise ValueError(
            "gallery, gallery_labels and gallery_groups go together: give all, or none"
        )
    queries, items, _ = inputs.check_vectors(embeddings, gallery)
    query_codes, gallery_codes = inputs.integer_labels(
        labels, gallery_labels, queries=len(queries), items=len(items), within=within
    )
    groups = np.asarray(groups)
    item_groups = groups if within else np.asarray(gallery_groups)
    for name, array, vectors in (
        ("groups", groups, queries),
        ("gallery_groups", item_groups, items),
    ):
        if array.shape != (len(vectors),):
            raise ValueError(
                f"{name} have shape {array.shape}, but there are {len(vectors)} embeddings"
            )
    dtype = inputs.compute_dtype(queries)
    mean, deviation = items.mean(axis=0, dtype=np.float64), float(items.std(dtype=np.float64))
    center = jnp.asarray(inputs.round_center(mean, deviation).astype(dtype))
    prepare = jax.jit(similarity_fn)
    columns, column_offsets = prepare(jnp.asarray(items.astype(dtype)), center)

    @jax.jit
    def similarities_fn(vectors: Float[Array, "b d"]) -> Float[Array, "b n"]:
        rows, row_offsets = prepare(vectors, center)
        products = jnp.matmul(rows, columns.T, precision=jax.lax.Precision.HIGHEST)
        return products + (row_offsets[:, None] + column_offsets[None])

    height = min(len(queries), max(1, tiles.STRIP_SIZE // len(items)))
    first, last = sharding.bounds(share or (0, 1), len(queries))
    for start in range(first, last, height):
        tiles.check_stop()
        rows = np.arange(start, min(start + height, last))
        vectors = np.zeros((height, queries.shape[1]), dtype)  # always of one size: compiled once
        vectors[: len(rows)] = queries[rows]
        similarities = np.asarray(similarities_fn(jnp.asarray(vectors)))[: len(rows)]
        is_left_out = groups[rows, None] == item_groups[None]
        is_left_out &= groups[rows, None] >= 0
        if within:
            is_left_out[np.arange(len(rows)), rows] = True
        is_same = query_codes[rows, None] == gallery_codes[None]
        is_positive = is_same & ~is_left_out
        counts = is_positive.sum(axis=1)
        positives = -np.sort(-np.where(is_positive, similarities, -np.inf), axis=1)
        positives = positives[:, : max(1, counts.max())]
        negatives = np.sort(np.where(is_same | is_left_out, -np.inf, similarities), axis=1)
        negatives_ahead = np.stack(
            [len(items) - np.searchsorted(n, p) for n, p in zip(negatives, positives, strict=True)]
        )
        places = np.arange(1, positives.shape[1] + 1)
        ranks = np.where(places <= counts[:, None], negatives_ahead + places, 0)
        yield Ranks(rows[counts > 0], ranks[counts > 0])
