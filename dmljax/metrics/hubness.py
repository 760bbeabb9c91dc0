"""Items that are among the nearest of very many queries."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from dmljax.retrieval import Labels

__all__ = ["Hubs", "hubs"]


class Hubs(NamedTuple):
    """How many queries find each item among their nearest.

    `counts` are the queries that find an item; `wrong` counts only queries of another class.
    `skewness` describes the counts, and `never_found` the share of items that no query finds.
    `order` lists the items that some query finds, those that are found wrongly most often first.
    """

    counts: Int[np.ndarray, "n"]
    wrong: Int[np.ndarray, "n"]
    skewness: float
    never_found: float
    order: Int[np.ndarray, "m"]


def hubs(
    nearest: Int[np.ndarray, "q k"],
    labels: Labels,
    *,
    gallery_labels: Labels | None = None,
    where: Bool[np.ndarray, "n"] | None = None,
) -> Hubs:
    """N_k(j) = #{i: j is among the k nearest of i} of every item (Radovanovic et al., 2010).

    `nearest` is the table of `neighborhoods`, -1 for no item. The skewness is E[(N - mean)^3] /
    sd^3: 0 for even counts, large if few items are found everywhere. `where` marks the items to
    count, such as those that could be read.

    >>> nearest = np.array([[2], [2], [1]])
    >>> hubs = metrics.hubs(nearest, np.array([0, 1, 1]))
    >>> hubs.counts.tolist(), hubs.wrong.tolist(), hubs.order.tolist()
    ([0, 1, 2], [0, 0, 1], [2, 1])
    """
    labels = np.asarray(labels)
    item_labels = labels if gallery_labels is None else np.asarray(gallery_labels)
    queries, places = np.nonzero(nearest >= 0)
    items = nearest[queries, places]
    is_wrong = labels[queries] != item_labels[items]
    counts = np.bincount(items, minlength=len(item_labels))
    wrong = np.bincount(items[is_wrong], minlength=len(item_labels))
    counted = counts if where is None else counts[where]
    skewness = never_found = float("nan")
    if len(counted):
        never_found = float(np.mean(counted == 0))
        deviations = counted - counted.mean()
        spread = np.sqrt(np.mean(deviations**2))
        skewness = float(np.mean(deviations**3) / spread**3) if spread > 0 else 0.0
    order = np.lexsort((np.arange(len(counts)), -counts, -wrong))
    return Hubs(counts, wrong, skewness, never_found, order[counts[order] > 0])
