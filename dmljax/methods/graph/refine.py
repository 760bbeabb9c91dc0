"""Test-time refinement: every embedding passes the graph network among its neighbors."""

from collections.abc import Callable

import numpy as np

from dmljax import retrieval

__all__ = ["refine"]


def refine(
    first_fn: Callable,
    embeddings: np.ndarray,
    *,
    query: np.ndarray | None = None,
    gallery: np.ndarray | None = None,
    rows: int = 256,
    **neighborhood: int,
) -> np.ndarray:
    """Refines embeddings `[n e]`: passes each through `first_fn` with its k-reciprocal neighbors.

    (Seidenschwarz et al., ICML 2021.) No label is used. Rows of NaN, the embeddings of images that
    could not be read, stay NaN.

    * `first_fn(neighborhoods [m batch_size d]) -> [m e]` returns the output for the first node of
      every neighborhood. It gets `rows` neighborhoods at a time.
    * `query`, `gallery` (bool `[n]`): queries are refined by embeddings of the gallery, which stay
      as they are. Without them all embeddings refine each other.
    * `neighborhood`: `k` and `batch_size` of `retrieval.k_reciprocal`. Their defaults are as
      published.
    """
    x = np.asarray(embeddings, np.float32)
    readable = np.isfinite(x).all(axis=1)
    if query is None and gallery is None:
        query_rows = np.flatnonzero(readable)
        near = retrieval.k_reciprocal(x[query_rows], **neighborhood)
        outputs = _in_chunks(first_fn, x, query_rows[near], rows)
        refined = np.full((len(x), outputs.shape[1]), np.nan, np.float32)
    else:
        query_rows, gallery_rows = (
            np.flatnonzero(readable if mask is None else readable & mask)
            for mask in (query, gallery)
        )
        if overlap := len(np.intersect1d(query_rows, gallery_rows)):
            raise ValueError(
                f"{overlap} images are query and gallery at once, so they would be refined and "
                "stay as they are: refine them without the masks"
            )
        near = retrieval.k_reciprocal(x[query_rows], x[gallery_rows], **neighborhood)
        neighborhoods = np.concatenate([query_rows[:, None], gallery_rows[near]], axis=1)
        outputs = _in_chunks(first_fn, x, neighborhoods, rows)
        if outputs.shape[1] != x.shape[1]:
            raise ValueError(
                f"queries of {outputs.shape[1]} numbers cannot be compared with a gallery of "
                f"{x.shape[1]}: use concat_layers=False and width=None"
            )
        refined = x.copy()
    refined[query_rows] = outputs
    return refined


def _in_chunks(
    first_fn: Callable, x: np.ndarray, neighborhoods: np.ndarray, rows: int
) -> np.ndarray:
    """Computes `first_fn(x[neighborhoods])` in chunks of one size, so that it compiles once."""
    rows, count = min(rows, len(neighborhoods)), len(neighborhoods)
    # The last chunk is filled up with the first neighborhoods, whose outputs are dropped.
    filled = neighborhoods[np.arange(-(-count // rows) * rows) % count]
    chunks = filled.reshape(-1, rows, neighborhoods.shape[1])
    return np.concatenate([np.asarray(first_fn(x[chunk])) for chunk in chunks])[:count]
