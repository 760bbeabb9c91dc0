"""A map of the embeddings: a position in the plane for every item."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from dmljax import retrieval
from dmljax.metrics.sides import unit_vectors
from dmljax.retrieval import Embeddings, Labels

__all__ = ["MapPositions", "map_positions"]

_NEIGHBORS, _TEMPERATURE = 3, 0.03  # anchors that place an item, and exp(s / temperature) weighs


class MapPositions(NamedTuple):
    """A position of every item, NaN for an unreadable one, and which items t-SNE placed.

    `note` says how the positions came about, for the text beside a map.
    """

    positions: Float[np.ndarray, "n 2"]
    is_anchor: Bool[np.ndarray, "n"]
    note: str


def map_positions(
    embeddings: Embeddings,
    labels: Labels,
    *,
    anchors: int = 5000,
    seed: int = 0,
    tile: int = 1024,
    devices: Sequence[Any] | None = None,
) -> MapPositions:
    """Positions by t-SNE (van der Maaten & Hinton, 2008); two dimensions and one as they are.

    Up to `anchors` items are placed by t-SNE of their unit vectors, with perplexity min(30, (n -
    1) / 4) and a start by principal components. Of more items, t-SNE places `anchors`, drawn by
    class in turn, and every other item lies at the mean of its 3 nearest anchors with weights
    exp(cosine / 0.03). One thread computes, so that the same embeddings give the same map.
    Neighborhoods in a map mean something; far distances, sizes and gaps do not.

    >>> embeddings = np.array([[0.0, 2.0], [3.0, 4.0]])
    >>> metrics.map_positions(embeddings, np.array([0, 1])).positions.tolist()
    [[0.0, 2.0], [3.0, 4.0]]
    """
    if anchors < _NEIGHBORS + 1:
        raise ValueError(f"anchors={anchors} must be at least {_NEIGHBORS + 1}, such as 5000")
    vectors, labels = np.asarray(embeddings), np.asarray(labels)
    if vectors.ndim != 2 or len(vectors) != len(labels):
        raise ValueError(
            f"embeddings have shape {vectors.shape} and labels {labels.shape}: give one row and "
            "one label for each item"
        )
    rows = np.flatnonzero(np.isfinite(vectors).all(axis=1))
    positions, is_anchor = np.full((len(vectors), 2), np.nan), np.zeros(len(vectors), bool)
    dimension = vectors.shape[1]
    if dimension <= 2:
        positions[rows] = np.pad(vectors[rows], ((0, 0), (0, 2 - dimension)))
        is_anchor[rows] = True
        return MapPositions(positions, is_anchor, f"the {dimension}-dimensional embedding itself")
    points = unit_vectors(vectors[rows])
    chosen = np.arange(len(rows))
    if len(rows) > anchors:
        chosen = np.sort(_by_class_in_turn(labels[rows], anchors, seed))
    is_anchor[rows[chosen]] = True
    anchor_positions = _tsne(points[chosen], seed)
    positions[rows[chosen]] = anchor_positions
    remaining = np.setdiff1d(np.arange(len(rows)), chosen)
    if not len(remaining):
        return MapPositions(positions, is_anchor, "all placed by t-SNE")
    indices, similarities = retrieval.nearest(
        points[remaining],
        points[chosen],
        k=_NEIGHBORS,
        similarity_fn=retrieval.cosine,
        tile=tile,
        devices=devices,
    )
    weights = np.exp((similarities - similarities[:, :1]) / _TEMPERATURE).astype(np.float64)
    weights /= weights.sum(axis=1, keepdims=True)
    positions[rows[remaining]] = (weights[:, :, None] * anchor_positions[indices]).sum(axis=1)
    note = f"{len(chosen):,} placed by t-SNE, the others near their neighbors"
    return MapPositions(positions, is_anchor, note)


def _by_class_in_turn(labels: np.ndarray, count: int, seed: int) -> Int[np.ndarray, "m"]:
    """`count` items: one of each class, then a second one of each, and so on."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(labels))
    by_class = order[np.argsort(labels[order], kind="stable")]
    _, starts, sizes = np.unique(labels[by_class], return_index=True, return_counts=True)
    turns = np.arange(len(labels)) - np.repeat(starts, sizes)
    turn_of = np.empty(len(labels), np.int64)
    turn_of[by_class] = turns
    return order[np.argsort(turn_of[order], kind="stable")][:count]


def _tsne(points: Float[np.ndarray, "n d"], seed: int) -> Float[np.ndarray, "n 2"]:
    """The positions of t-SNE; too few points, or equal ones, have the simplest positions."""
    if len(points) < 4 or not np.ptp(points, axis=0).any():
        return (points - points[:1])[:, :2].astype(np.float64)
    # Imported here: scikit-learn takes a second to import.
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits

    # The order of its sums, and so its map, depends on the number of threads.
    with threadpool_limits(1):
        tsne = TSNE(perplexity=min(30, (len(points) - 1) / 4), init="pca", random_state=seed)
        return np.asarray(tsne.fit_transform(points), np.float64)
