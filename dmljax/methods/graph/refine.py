"""Embeddings refined by a net that looks at several at once, each among its neighbours."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dmljax.retrieval import reciprocal

__all__ = ["refine"]


def refine(
    first_fn: Callable,
    embeddings: np.ndarray,
    *,
    query: np.ndarray | None = None,
    gallery: np.ndarray | None = None,
    k: int = 30,
    batch_size: int | None = None,
    rows: int = 256,
) -> np.ndarray:
    """What `first_fn` makes of each embedding in its k-reciprocal neighbourhood, `[n e]`.

    `first_fn(nodes [m batch_size d]) -> [m e]` is asked for the first node of each of `m`
    neighbourhoods, which come `rows` at a time. No label is used. With a query and a gallery
    (`bool [n]`), as for In-Shop, queries are refined by the gallery's embeddings, and those stay as
    they are. `batch_size` is 7, or 4 with a gallery, as in Seidenschwarz et al. (ICML 2021). Rows
    of NaN, images that could not be read, stay NaN.
    """
    x = np.asarray(embeddings, np.float32)
    readable = np.isfinite(x).all(axis=1)
    if query is None and gallery is None:
        asked = np.flatnonzero(readable)
        near = reciprocal.k_reciprocal(x[asked], k=k, batch_size=batch_size or 7)
        found = _in_parts(first_fn, x, asked[near], rows)
        refined = np.full((len(x), found.shape[1]), np.nan, np.float32)
    else:
        asked, offered = (
            np.flatnonzero(readable if mask is None else readable & mask)
            for mask in (query, gallery)
        )
        if both := len(np.intersect1d(asked, offered)):
            raise ValueError(
                f"{both} images are query and gallery at once, so they would be refined and stay "
                "as they are: refine them without the masks"
            )
        near = reciprocal.k_reciprocal_queries(
            x[asked], x[offered], k=k, batch_size=batch_size or 4
        )
        hoods = np.concatenate([asked[:, None], offered[near]], axis=1)
        found = _in_parts(first_fn, x, hoods, rows)
        if found.shape[1] != x.shape[1]:
            raise ValueError(
                f"queries of {found.shape[1]} numbers cannot be compared with a gallery of "
                f"{x.shape[1]}: use concat_layers=False and width=None"
            )
        refined = x.copy()
    refined[asked] = found
    return refined


def _in_parts(first_fn: Callable, x: np.ndarray, hoods: np.ndarray, rows: int) -> np.ndarray:
    """`first_fn` of `x[hoods]`, always for the same number of rows, so that it compiles once."""
    rows, count = min(rows, len(hoods)), len(hoods)
    filled = hoods[np.arange(-(-count // rows) * rows) % count]
    parts = [np.asarray(first_fn(x[part])) for part in filled.reshape(-1, rows, hoods.shape[1])]
    return np.concatenate(parts)[:count]
