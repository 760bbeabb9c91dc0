"""What every function about pairs of items starts from: the two sides of the search, checked."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, Integer

from dmljax.retrieval import Embeddings, Labels
from dmljax.retrieval.inputs import integer_labels
from dmljax.vectors import unit_vectors

__all__ = ["Side", "Sides", "in_turn", "sides", "turns"]


class Side(NamedTuple):
    """The readable items of one side; `rows` are their numbers in the input."""

    rows: Int[np.ndarray, "n"]
    vectors: Float[np.ndarray, "n d"]
    codes: Int[np.ndarray, "n"]  # labels as 0..c-1, the same on both sides
    groups: Int[np.ndarray, "n"]  # -1 is no group

    def take(self, order: Int[np.ndarray, "m"] | slice) -> "Side":
        return Side(*(array[order] for array in self))


class Sides(NamedTuple):
    """Queries and gallery. With `within` both are the same set; no item pairs with itself."""

    queries: Side
    gallery: Side
    within: bool
    classes: np.ndarray  # the label of each code


def sides(
    embeddings: Embeddings,
    labels: Labels,
    gallery: Embeddings | None = None,
    gallery_labels: Labels | None = None,
    groups: Integer[np.ndarray, "q"] | None = None,
    gallery_groups: Integer[np.ndarray, "n"] | None = None,
    *,
    prepare_fn: Callable[[np.ndarray], np.ndarray] = unit_vectors,
) -> Sides:
    """The sides of a search, their vectors prepared by `prepare_fn`.

    Rows with a NaN or an infinity, images that could not be read, are left out.
    """
    within = gallery is None
    if within != (gallery_labels is None):
        raise ValueError("gallery and gallery_labels go together: give both, or neither")
    if not within and (groups is None) != (gallery_groups is None):
        raise ValueError("groups and gallery_groups go together: give both, or neither")
    if within and gallery_groups is not None:
        raise ValueError("gallery_groups are given, but no gallery: leave them out")
    query_vectors = _array(embeddings, "embeddings")
    item_vectors = query_vectors if gallery is None else _array(gallery, "gallery")
    if query_vectors.shape[1] != item_vectors.shape[1]:
        raise ValueError(
            f"embeddings have {query_vectors.shape[1]} dimensions and the gallery has "
            f"{item_vectors.shape[1]}: embed both with the same net"
        )
    query_codes, item_codes = integer_labels(
        labels,
        gallery_labels,
        queries=len(query_vectors),
        items=len(item_vectors),
        within=within,
    )
    all_labels = np.asarray(labels)
    if gallery_labels is not None:
        all_labels = np.concatenate([all_labels, np.asarray(gallery_labels)])
    queries = _side(prepare_fn, query_vectors, query_codes, groups, "groups")
    if within:
        return Sides(queries, queries, True, np.unique(all_labels))
    items = _side(prepare_fn, item_vectors, item_codes, gallery_groups, "gallery_groups")
    return Sides(queries, items, False, np.unique(all_labels))


def turns(labels: Integer[np.ndarray, "n"]) -> Int[np.ndarray, "n"]:
    """How many items before each item have its label."""
    order = np.argsort(labels, kind="stable")
    places = np.empty(len(labels), np.int64)
    places[order] = np.arange(len(labels)) - np.searchsorted(labels[order], labels[order])
    return places


def in_turn(order: Int[np.ndarray, "m"], labels: np.ndarray) -> Int[np.ndarray, "m"]:
    """The items of `order` with one item of every class first, then the second of every class."""
    return order[np.lexsort((labels[order], turns(labels[order])))]


def _array(vectors: Embeddings, name: str) -> np.ndarray:
    array = np.asarray(vectors)
    if array.ndim != 2:
        raise ValueError(f"{name} have shape {array.shape}: give an array [items, dimensions]")
    return array


def _side(
    prepare_fn: Callable[[np.ndarray], np.ndarray],
    vectors: np.ndarray,
    codes: np.ndarray,
    groups: np.ndarray | None,
    groups_name: str,
) -> Side:
    if groups is None:
        groups = np.full(len(vectors), -1)
    groups = np.asarray(groups)
    if groups.shape != (len(vectors),):
        raise ValueError(
            f"{groups_name} have shape {groups.shape}, but there are {len(vectors)} embeddings"
        )
    rows = np.flatnonzero(np.isfinite(vectors).all(axis=1))
    return Side(rows, prepare_fn(vectors[rows]), codes[rows], groups[rows].astype(np.int64))
