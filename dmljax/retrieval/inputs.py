"""Checks of the arrays that a search is given, and the center that they are measured from."""

import concurrent.futures

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Integer

from dmljax.files import cores

Embeddings = Float[Array, "b d"] | np.ndarray
Labels = Integer[Array, "b"] | np.ndarray


def check_vectors(
    embeddings: Embeddings, gallery: Embeddings | None
) -> tuple[np.ndarray, np.ndarray, Float[np.ndarray, "d"]]:
    """Queries, gallery (the queries themselves if None) and the gallery's rounded mean."""
    queries, center = _check_finite(embeddings, "embeddings")
    if gallery is None:
        return queries, queries, center
    items, center = _check_finite(gallery, "gallery")
    if items.shape[1] != queries.shape[1]:
        raise ValueError(
            f"embeddings have {queries.shape[1]} dimensions and the gallery has "
            f"{items.shape[1]}: embed both with the same net"
        )
    return queries, items, center


def items_to_find(queries: Embeddings, gallery: Embeddings | None) -> int:
    """The number of items among which a query searches. Raises if there are none."""
    items = len(queries) - 1 if gallery is None else len(gallery)
    if items < 1:
        among = "without a gallery" if gallery is None else "and an empty gallery"
        raise ValueError(
            f"there is nothing to find for {len(queries)} embeddings {among}: give two or more "
            "embeddings, or a gallery"
        )
    return items


def check_k(k: int, count: int, *, noun: str, of: str) -> None:
    """Raises unless k is an integer from 1 to `count`."""
    if isinstance(k, bool) or not hasattr(k, "__index__") or not 1 <= k <= count:
        raise ValueError(
            f"k={k}{noun}, but there are {count} {of}: choose an integer k from 1 to {count}"
        )


def integer_labels(
    labels: Labels, gallery_labels: Labels | None, *, queries: int, items: int, within: bool
) -> tuple[Int[np.ndarray, "q"], Int[np.ndarray, "n"]]:
    """Labels of queries and gallery as 0..c-1; with `within` both are the same set.

    Labels are compared as integers: in float32, labels above 2^24 would collide.
    """
    if within != (gallery_labels is None):
        raise ValueError("gallery and gallery_labels go together: give both, or neither")
    labels = np.asarray(labels)
    item_labels = labels if within else np.asarray(gallery_labels)
    for name, array, size in (("labels", labels, queries), ("gallery_labels", item_labels, items)):
        if array.shape != (size,):
            raise ValueError(f"{name} have shape {array.shape}, but there are {size} embeddings")
    if np.result_type(labels, item_labels).kind not in "iub":
        raise ValueError(
            f"labels are {' and '.join({str(labels.dtype): 0, str(item_labels.dtype): 0})}: give "
            "integers of one signedness "
            "(np.unique(names, return_inverse=True)[1] makes them of names)"
        )
    _, codes = np.unique(np.concatenate([labels, item_labels]), return_inverse=True)
    return codes[:queries], codes[:queries] if within else codes[queries:]


def exclusion_codes(
    groups: np.ndarray | None,
    gallery_groups: np.ndarray | None,
    *,
    queries: int,
    items: int,
    within: bool,
) -> tuple[Int[np.ndarray, "q g"], Int[np.ndarray, "n g"]]:
    """Codes of queries and items that are equal where a query leaves an item out.

    A query leaves out itself and, in any column, the items of its group; -1 is no group.
    """
    query_numbers = np.arange(queries)[:, None]
    item_numbers = query_numbers if within else queries + np.arange(items)[:, None]
    if groups is None and gallery_groups is None:
        return query_numbers, item_numbers
    if groups is None or (gallery_groups is None) != within:
        raise ValueError(
            "groups are for queries and gallery_groups for the gallery: give both, or only groups "
            "without a gallery"
        )
    row_groups, column_groups = np.asarray(groups), np.asarray(groups if within else gallery_groups)
    for name, array, size in (
        ("groups", row_groups, queries),
        ("gallery_groups", column_groups, items),
    ):
        if array.ndim not in (1, 2) or len(array) != size or array.dtype.kind not in "iu":
            raise ValueError(
                f"{name} are {array.dtype} of shape {array.shape}: give integers, one or one row "
                f"for each of the {size} embeddings"
            )
    row_groups, column_groups = row_groups.reshape(queries, -1), column_groups.reshape(items, -1)
    if row_groups.shape[1] != column_groups.shape[1]:
        raise ValueError(
            f"groups have {row_groups.shape[1]} columns and gallery_groups "
            f"{column_groups.shape[1]}: give as many"
        )
    codes = [
        np.unique(column, return_inverse=True)[1]
        for column in np.concatenate([row_groups, column_groups]).T
    ]
    table = queries + items + np.stack(codes, axis=1)
    return (
        np.where(row_groups == -1, query_numbers, table[:queries]),
        np.where(column_groups == -1, item_numbers, table[queries:]),
    )


def compute_dtype(vectors: np.ndarray) -> np.dtype:
    """The dtype that similarities are computed in: float32 or, where jax has it, float64."""
    if not any(jnp.issubdtype(vectors.dtype, x) for x in (jnp.floating, jnp.integer, jnp.bool_)):
        raise ValueError(f"embeddings are {vectors.dtype}: give real numbers")
    return np.dtype(jnp.promote_types(jax.dtypes.canonicalize_dtype(vectors.dtype), jnp.float32))


def round_center(mean: Float[np.ndarray, "d"], deviation: float) -> Float[np.ndarray, "d"]:
    """The mean, rounded to a grid as coarse as the data are wide.

    The grid is a power of two: whole numbers stay whole, and exact ties stay exact.
    """
    if not deviation > 0:
        return np.zeros_like(mean)
    grid = 2.0 ** np.ceil(np.log2(deviation))
    return np.round(mean / grid) * grid


def _check_finite(vectors: Embeddings, name: str) -> tuple[np.ndarray, Float[np.ndarray, "d"]]:
    """The array and its rounded mean, read once and in pieces: it may be a memory-mapped file."""
    vectors = np.asarray(vectors)
    if vectors.ndim != 2 or 0 in vectors.shape:
        raise ValueError(
            f"{name} of shape {vectors.shape}: give an array [items, dimensions], not empty"
        )
    dtype = compute_dtype(vectors)

    def sums(start: int) -> tuple[Float[np.ndarray, "d"], float]:
        rows = vectors[start : start + 4096].astype(dtype, copy=False)
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
    with concurrent.futures.ThreadPoolExecutor(cores.count()) as pool:
        for of_rows, of_squares in pool.map(sums, range(0, len(vectors), 4096)):
            total += of_rows
            squares += of_squares
    mean = total / len(vectors)
    variance = max(squares / len(vectors) - float(mean @ mean), 0.0) / len(mean)
    return vectors, round_center(mean, float(np.sqrt(variance)))
