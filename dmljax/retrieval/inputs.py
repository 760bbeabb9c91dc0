"""Checks of the arrays of a search, and the center from which vectors are measured."""

import concurrent.futures
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Integer

from dmljax.files import machine

Embeddings = Float[Array, "b d"] | np.ndarray
Labels = Integer[Array, "b"] | np.ndarray
Groups = np.ndarray  # integers [n], or [n g]

_ROWS = 4096  # of an array that are read at once


def check_vectors(
    embeddings: Embeddings, gallery: Embeddings | None
) -> tuple[np.ndarray, np.ndarray, Float[np.ndarray, "d"]]:
    """Returns queries, gallery (the queries themselves if None) and the gallery's rounded mean."""
    queries = np.asarray(embeddings)
    items = queries if gallery is None else np.asarray(gallery)
    check_shapes(queries, items)
    center = _check_finite(queries, "embeddings")
    return queries, items, center if gallery is None else _check_finite(items, "gallery")


def check_shapes(queries: np.ndarray, items: np.ndarray) -> None:
    """Raises unless both are arrays [items, dimensions] with the same dimensions."""
    for name, array in (("embeddings", queries), ("gallery", items)):
        if array.ndim != 2 or not array.shape[1]:
            raise ValueError(
                f"{name} of shape {array.shape}: give an array [items, dimensions], not empty"
            )
    if items.shape[1] != queries.shape[1]:
        raise ValueError(
            f"embeddings have {queries.shape[1]} dimensions and the gallery has "
            f"{items.shape[1]}: embed both with the same net"
        )


def check_k(k: int, count: int, *, of: str, name: str = "k") -> None:
    """Raises unless k is an integer from 1 to `count`."""
    if isinstance(k, bool) or not hasattr(k, "__index__") or not 1 <= k <= count:
        raise ValueError(f"{name} must be an integer from 1 to {max(count, 0)} {of}, got {k}")


def check_share(share: tuple[int, int] | None, sum_fn: Any) -> None:
    """Raises unless a share of several processes comes with the sum over them."""
    if (share is None) != (sum_fn is None):
        raise ValueError("share and sum_fn go together: give both, or neither")


def share_rows(count: int, share: tuple[int, int]) -> slice:
    """Returns the rows of the share `(i, n)` of `count` rows."""
    index, parts = share
    if not 0 <= index < parts:
        raise ValueError(f"share={share} must be (i, n) with i from 0 to n - 1")
    return slice(count * index // parts, count * (index + 1) // parts)


class Counts(NamedTuple):
    """The counts of queries and of items; `within` says that both are the same set."""

    queries: int
    items: int
    within: bool

    @property
    def candidates(self) -> int:
        """The count of items among which a query searches."""
        return self.items - self.within


def counts_of(queries: Embeddings, gallery: Embeddings | None) -> Counts:
    """Returns the counts of a search. Without a gallery, the queries search themselves."""
    return Counts(len(queries), len(queries if gallery is None else gallery), gallery is None)


def integer_labels(
    labels: Labels, gallery_labels: Labels | None, counts: Counts
) -> tuple[Int[np.ndarray, "q"], Int[np.ndarray, "n"]]:
    """Returns the labels of queries and gallery as 0..c-1.

    Labels are compared as integers: in float32, labels above 2^24 would collide.
    """
    return _codes(*_both("labels", labels, gallery_labels, counts, most_axes=1))


def exclusion_codes(
    groups: Groups | None, gallery_groups: Groups | None, counts: Counts
) -> tuple[Int[np.ndarray, "q g"], Int[np.ndarray, "n g"]]:
    """Returns codes of queries and items for `rules.mask`: equal where a query leaves an item out.

    A query leaves out itself and the items that share a group in any column; -1 means no group.
    """
    queries, items, within = counts
    indices = np.arange(queries)[:, None]
    item_indices = indices if within else queries + np.arange(items)[:, None]
    if groups is None and gallery_groups is None:
        return indices, item_indices
    both = _both("groups", groups, gallery_groups, counts, most_axes=2)
    query_groups, item_groups = (x.reshape(len(x), -1) for x in both)
    query_codes, item_codes = _codes(query_groups, item_groups)
    return (
        np.where(query_groups == -1, indices, queries + items + query_codes),
        np.where(item_groups == -1, item_indices, queries + items + item_codes),
    )


def _both(
    name: str, values: Any, gallery_values: Any, counts: Counts, *, most_axes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the integers of queries and gallery. Raises unless they can be compared."""
    if values is None or (gallery_values is None) != counts.within:
        raise ValueError(
            f"{name} are for queries and gallery_{name} for the gallery: give both, or only {name} "
            "without a gallery"
        )
    first = _integers(name, values, counts.queries, most_axes)
    last = first
    if not counts.within:
        last = _integers(f"gallery_{name}", gallery_values, counts.items, most_axes)
    if first.dtype.kind != last.dtype.kind or first[:1].size != last[:1].size:
        raise ValueError(
            f"{name} are {first.dtype} of shape {first.shape} and gallery_{name} {last.dtype} of "
            f"shape {last.shape}: give integers of one signedness, and the same number of columns"
        )
    return first, last


def _integers(name: str, values: Any, size: int, most_axes: int) -> np.ndarray:
    array = np.asarray(values)
    if not 1 <= array.ndim <= most_axes or len(array) != size or array.dtype.kind not in "iub":
        raise ValueError(
            f"{name} are {array.dtype} of shape {array.shape}: give integers, one for each of the "
            f"{size} embeddings (np.unique(names, return_inverse=True)[1] makes them of names)"
        )
    return array


def _codes(first: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns codes from 0, which are equal where the integers of both arrays are equal."""
    _, codes = np.unique(np.concatenate([first, last]), return_inverse=True)
    codes = codes.reshape(-1, *first.shape[1:])
    return codes[: len(first)], codes[len(first) :]


def compute_dtype(vectors: np.ndarray) -> np.dtype:
    """Returns the dtype of the similarities: float32 or, where jax has it, float64."""
    if not any(jnp.issubdtype(vectors.dtype, x) for x in (jnp.floating, jnp.integer, jnp.bool_)):
        raise ValueError(f"embeddings are {vectors.dtype}: give real numbers")
    return np.dtype(jnp.promote_types(jax.dtypes.canonicalize_dtype(vectors.dtype), jnp.float32))


def round_center(mean: Float[np.ndarray, "d"], std: float) -> Float[np.ndarray, "d"]:
    """Returns the mean, rounded to a grid of the size of `std`.

    The grid is a power of two: whole numbers stay whole, and exact ties stay exact.
    """
    if not std > 0:
        return np.zeros_like(mean)
    grid = 2.0 ** np.ceil(np.log2(std))
    return np.round(mean / grid) * grid


def _check_finite(vectors: np.ndarray, name: str) -> Float[np.ndarray, "d"]:
    """Returns the rounded mean. Reads the array once, in pieces: it may be a mapped file."""
    if not len(vectors):
        raise ValueError(f"{name} of shape {vectors.shape}: give an array that is not empty")
    dtype = compute_dtype(vectors)

    def sums(start: int) -> tuple[Float[np.ndarray, "d"], float]:
        rows = vectors[start : start + _ROWS].astype(dtype, copy=False)
        with np.errstate(over="ignore", invalid="ignore"):
            squared_norms = np.vecdot(rows, rows)
        if len(not_finite := np.flatnonzero(~np.isfinite(squared_norms))):
            raise ValueError(
                f"{name}[{start + not_finite[0]}] is not finite, or its norm is not: a NaN, an "
                f"infinity or an overflow of {dtype.name}. Find where the net diverged, or scale "
                "the embeddings"
            )
        return rows.sum(axis=0), float(squared_norms.sum(dtype=np.float64))

    total, squares = np.zeros(vectors.shape[1]), 0.0
    with concurrent.futures.ThreadPoolExecutor(machine.core_count()) as pool:
        for row_sum, row_squares in pool.map(sums, range(0, len(vectors), _ROWS)):
            total += row_sum
            squares += row_squares
    mean = total / len(vectors)
    variance = max(squares / len(vectors) - float(mean @ mean), 0.0) / len(mean)
    return round_center(mean, float(np.sqrt(variance)))
