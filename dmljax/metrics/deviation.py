"""Scores of embeddings themselves: functions of (embeddings, labels)."""

import numpy as np
from jaxtyping import Float

from dmljax.retrieval import Embeddings, Labels

__all__ = ["class_deviation"]


def class_deviation(embeddings: Embeddings, labels: Labels) -> float:
    """Deviation within classes relative to the deviation between them (Lin et al., 2018, table 4).

    sqrt(sum_i |x_i - c(y_i)|^2 / sum_i |c(y_i) - m|^2), with the mean c(y) of a class and the mean
    m of all embeddings. The paper reports it in percent, and does not give its formula: here
    numerator and denominator add up to the squared deviations of all embeddings from m. 0 if all
    items of a class are equal, infinite if all classes have the same mean, NaN if all items are
    equal.

    >>> embeddings = np.array([[-1.0], [1.0], [3.0], [5.0]])
    >>> metrics.class_deviation(embeddings, np.array([0, 0, 1, 1]))
    0.5
    """
    x, labels = np.asarray(embeddings, np.float64), np.asarray(labels)
    if labels.shape != x.shape[:1] or not len(x):
        raise ValueError(f"labels have shape {labels.shape}, but embeddings have {x.shape}")
    _, codes = np.unique(labels, return_inverse=True)
    sums = np.zeros((codes.max() + 1, x.shape[1]))
    np.add.at(sums, codes, x)
    centers: Float[np.ndarray, "c d"] = sums / np.bincount(codes)[:, None]
    within = np.sum((x - centers[codes]) ** 2)
    between = np.sum((centers[codes] - x.mean(axis=0)) ** 2)
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.sqrt(within / between))
