"""Retrieval scores: functions of the ranks of each query's positives. One value per query.

In the formulas, R is the number of positives of a query and rank_1 <= ... <= rank_R are their
ranks in the gallery, counted from 1: a row of `ranks`, in ascending order, padded with 0.
"""

import numpy as np
from jaxtyping import Bool, Float, Int

__all__ = [
    "average_precision",
    "map_at_k",
    "map_at_r",
    "precision_at_1",
    "r_precision",
    "recall_at_k",
    "reciprocal_rank",
    "reciprocal_rank_at_k",
]


def recall_at_k(ranks: Int[np.ndarray, "q r"], *, k: int) -> Float[np.ndarray, "q"]:
    """Computes R@K = [rank_1 <= K]: 1 if a positive is among the first K (Jegou et al., 2011).

    >>> ranks = np.array([[1, 3], [4, 0]])  # two positives at ranks 1 and 3; one at rank 4
    >>> metrics.recall_at_k(ranks, k=2)
    array([1., 0.])
    """
    _check_depth(k)
    first = _first_ranks(ranks)
    return np.where(np.isnan(first), np.nan, first <= k)


def precision_at_1(ranks: Int[np.ndarray, "q r"]) -> Float[np.ndarray, "q"]:
    """Computes P@1 = [rank_1 = 1]: 1 if the first item is a positive. It equals R@1.

    >>> ranks = np.array([[1, 3], [4, 0]])  # two positives at ranks 1 and 3; one at rank 4
    >>> metrics.precision_at_1(ranks)
    array([1., 0.])
    """
    return recall_at_k(ranks, k=1)


def r_precision(ranks: Int[np.ndarray, "q r"]) -> Float[np.ndarray, "q"]:
    """Computes RP = #{j: rank_j <= R} / R, the fraction of positives among the first R items.

    (Manning et al., 2008, section 8.4; Musgrave et al., 2020.)

    >>> ranks = np.array([[1, 3], [4, 0]])  # two positives at ranks 1 and 3; one at rank 4
    >>> metrics.r_precision(ranks)
    array([0.5, 0. ])
    """
    within_r, counts = _within_r(ranks)
    return divide(within_r.sum(axis=1), counts)


def map_at_r(ranks: Int[np.ndarray, "q r"]) -> Float[np.ndarray, "q"]:
    """Computes MAP@R = (1 / R) sum_j [rank_j <= R] j / rank_j (Musgrave et al., 2020).

    Average precision in which a positive behind the first R items counts as 0.

    >>> ranks = np.array([[1, 3], [4, 0]])  # two positives at ranks 1 and 3; one at rank 4
    >>> metrics.map_at_r(ranks)
    array([0.5, 0. ])
    """
    within_r, counts = _within_r(ranks)
    return divide(np.where(within_r, _precisions(ranks), 0).sum(axis=1), counts)


def average_precision(ranks: Int[np.ndarray, "q r"]) -> Float[np.ndarray, "q"]:
    """Computes AP = (1 / R) sum_j j / rank_j (Manning et al., 2008, section 8.4).

    The mean of the precision at each positive. Its mean over the queries is mAP.

    >>> ranks = np.array([[1, 4], [4, 0]])  # two positives at ranks 1 and 4; one at rank 4
    >>> metrics.average_precision(ranks)
    array([0.75, 0.25])
    """
    _, counts = _within_r(ranks)
    return divide(_precisions(ranks).sum(axis=1), counts)


def reciprocal_rank(ranks: Int[np.ndarray, "q r"]) -> Float[np.ndarray, "q"]:
    """Computes RR = 1 / rank_1 (Voorhees, 1999). The mean over the queries is MRR.

    >>> ranks = np.array([[1, 3], [4, 0]])  # two positives at ranks 1 and 3; one at rank 4
    >>> metrics.reciprocal_rank(ranks)
    array([1.  , 0.25])
    """
    return 1 / _first_ranks(ranks)


def map_at_k(ranks: Int[np.ndarray, "q r"], *, k: int) -> Float[np.ndarray, "q"]:
    """Computes AP@K = (1 / R) sum_j [rank_j <= K] j / rank_j, average precision with cutoff K.

    The sum is divided by R even if R is larger than K, as in pytorch-metric-learning (Musgrave et
    al., 2020, arXiv:2008.09164). Its "max_bin_count" is the largest R of all queries; where all R
    are equal, that is MAP@R.

    >>> ranks = np.array([[1, 4], [4, 0]])  # two positives at ranks 1 and 4; one at rank 4
    >>> metrics.map_at_k(ranks, k=3)
    array([0.5, 0. ])
    """
    _check_depth(k)
    _, counts = _within_r(ranks)
    return divide(np.where(ranks <= k, _precisions(ranks), 0).sum(axis=1), counts)


def reciprocal_rank_at_k(ranks: Int[np.ndarray, "q r"], *, k: int) -> Float[np.ndarray, "q"]:
    """Computes RR@K = [rank_1 <= K] / rank_1: the reciprocal rank, or 0 beyond the cutoff K.

    >>> ranks = np.array([[1, 3], [4, 0]])  # two positives at ranks 1 and 3; one at rank 4
    >>> metrics.reciprocal_rank_at_k(ranks, k=3)
    array([1., 0.])
    """
    _check_depth(k)
    first = _first_ranks(ranks)
    return np.where(first > k, 0, 1 / first)


def _check_depth(k: int) -> None:
    if k < 1:
        raise ValueError(f"k={k} must be at least 1")


def _check_ranks(ranks: Int[np.ndarray, "q r"]) -> None:
    if ranks.ndim != 2 or ranks.dtype.kind not in "iu":
        raise ValueError(
            f"ranks must be integers [q r], not {ranks.dtype} {list(ranks.shape)}: take them from "
            "the blocks of retrieval.ranks, or call metrics.retrieval(embeddings, labels)"
        )


def _first_ranks(ranks: Int[np.ndarray, "q r"]) -> Float[np.ndarray, "q"]:
    """Returns the rank of the best positive, NaN if there is none."""
    _check_ranks(ranks)
    if ranks.shape[1] == 0:
        return np.full(len(ranks), np.nan)
    return np.where(ranks[:, 0] > 0, ranks[:, 0], np.nan)


def _within_r(
    ranks: Int[np.ndarray, "q r"],
) -> tuple[Bool[np.ndarray, "q r"], Int[np.ndarray, "q"]]:
    """Returns which positives are among the first R items, and R."""
    _check_ranks(ranks)
    is_rank = ranks > 0
    counts = is_rank.sum(axis=1)
    return is_rank & (ranks <= counts[:, None]), counts


def _precisions(ranks: Int[np.ndarray, "q r"]) -> Float[np.ndarray, "q r"]:
    """Computes j / rank_j, and 0 for padding."""
    return np.arange(1, ranks.shape[1] + 1) / np.where(ranks > 0, ranks, np.inf)


def divide(totals: np.ndarray, counts: np.ndarray) -> Float[np.ndarray, "..."]:
    """Computes totals / counts, NaN where the count is 0."""
    return np.divide(totals, counts, out=np.full(np.shape(counts), np.nan), where=counts > 0)
