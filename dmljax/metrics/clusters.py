"""Clustering scores: agreement of labels and clusters, and how compact the classes are.

Scores of (labels, assignment) are computed from the filled cells of the contingency table. Two
equal partitions score 1, whatever their clusters are called.
"""

# scikit-learn has NMI, AMI and ARI too. Its AMI takes 26 s for one clustering of Stanford Online
# Products (60,502 items, 11,316 classes), where the sum over distinct sizes below takes 0.01 s; and
# all that AMI needs gives the other scores too.

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from dmljax.retrieval.inputs import Embeddings, Labels

__all__ = ["ami", "ari", "class_deviation", "nmi", "pairwise_f1"]


def nmi(labels: Labels, assignment: Int[np.ndarray, "b"]) -> float:
    """Computes the normalized mutual information NMI = 2 I / (H + H').

    (Manning et al., 2008, section 16.3.) I is the mutual information of labels and clusters, H and
    H' are their entropies.

    >>> labels, assignment = np.array([0, 0, 1, 1]), np.array([0, 0, 1, 2])
    >>> round(metrics.nmi(labels, assignment), 3)
    0.8
    """
    table = _contingency(labels, assignment)
    if table.is_one_to_one:
        return 1.0
    return table.information() / table.mean_entropy()


def ami(labels: Labels, assignment: Int[np.ndarray, "b"]) -> float:
    """Computes the adjusted mutual information AMI = (I - E[I]) / ((H + H') / 2 - E[I]).

    (Vinh et al., 2010.) E[I] is the mean of the mutual information I over random partitions with
    the same sizes.

    >>> labels, assignment = np.array([0, 0, 1, 1]), np.array([0, 0, 1, 2])
    >>> round(metrics.ami(labels, assignment), 3)
    0.571
    """
    table = _contingency(labels, assignment)
    if table.is_one_to_one:
        return 1.0
    if len(table.class_sizes) == 1 or len(table.cluster_sizes) == 1:
        return 0.0
    expected = _expected_information(table.class_sizes, table.cluster_sizes)
    return float((table.information() - expected) / (table.mean_entropy() - expected))


def ari(labels: Labels, assignment: Int[np.ndarray, "b"]) -> float:
    """Computes the adjusted Rand index ARI = (S - E) / ((P + P') / 2 - E).

    (Hubert & Arabie, 1985.) P pairs of items share a label, P' share a cluster, S share both, and E
    = P P' / #pairs is the S to expect by chance.

    >>> labels, assignment = np.array([0, 0, 1, 1]), np.array([0, 0, 1, 2])
    >>> round(metrics.ari(labels, assignment), 3)
    0.571
    """
    table = _contingency(labels, assignment)
    if table.is_one_to_one:
        return 1.0
    same_both, same_class, same_cluster = table.pairs()
    n = table.class_sizes.sum()
    chance = same_class * same_cluster / (n * (n - 1) / 2)
    return float((same_both - chance) / ((same_class + same_cluster) / 2 - chance))


def pairwise_f1(labels: Labels, assignment: Int[np.ndarray, "b"]) -> float:
    """Computes F1 = 2 S / (P + P') over pairs of items (Manning et al., 2008, section 16.3).

    P pairs of items share a label, P' share a cluster, S share both: the harmonic mean of the
    precision S / P' and the recall S / P.

    >>> labels, assignment = np.array([0, 0, 1, 1]), np.array([0, 0, 1, 2])
    >>> round(metrics.pairwise_f1(labels, assignment), 3)
    0.667
    """
    table = _contingency(labels, assignment)
    if table.is_one_to_one:
        return 1.0
    same_both, same_class, same_cluster = table.pairs()
    return 2 * same_both / (same_class + same_cluster)


def class_deviation(embeddings: Embeddings, labels: Labels) -> float:
    """Computes the deviation within classes divided by the deviation between them.

    (Lin et al., 2018, table 4.) It is sqrt(sum_i |x_i - c(y_i)|^2 / sum_i |c(y_i) - m|^2), with the
    mean c(y) of a class and the mean m of all embeddings. The paper reports it in percent, and does
    not give its formula: here numerator and denominator add up to the squared deviations of all
    embeddings from m. 0 if all items of a class are equal, infinite if all classes have the same
    mean, NaN if all items are equal.

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


class _Contingency(NamedTuple):
    """The table of labels against clusters: items of each class, cluster and filled cell.

    `products` are the products of the class size and the cluster size of each cell.
    """

    class_sizes: Int[np.ndarray, "c"]
    cluster_sizes: Int[np.ndarray, "k"]
    cell_sizes: Int[np.ndarray, "m"]
    products: Float[np.ndarray, "m"]

    @property
    def is_one_to_one(self) -> bool:
        """True if labels and clusters are the same partition, for which formulas may give 0 / 0."""
        return len(self.cell_sizes) == len(self.class_sizes) == len(self.cluster_sizes)

    def information(self) -> float:
        """Computes the mutual information of labels and clusters, in nats."""
        if len(self.class_sizes) == 1 or len(self.cluster_sizes) == 1:
            return 0.0
        n, sizes = self.class_sizes.sum(), self.cell_sizes
        return max(0.0, float(np.sum(sizes / n * np.log(sizes * n / self.products))))

    def mean_entropy(self) -> float:
        return (_entropy(self.class_sizes) + _entropy(self.cluster_sizes)) / 2

    def pairs(self) -> tuple[float, float, float]:
        """Counts the pairs of items that share label and cluster, the label, and the cluster."""
        sizes = self.cell_sizes, self.class_sizes, self.cluster_sizes
        same_both, same_class, same_cluster = (float(np.sum(m * (m - 1.0)) / 2) for m in sizes)
        return same_both, same_class, same_cluster


def _contingency(labels: Labels, assignment: Int[np.ndarray, "b"]) -> _Contingency:
    labels, assignment = np.asarray(labels), np.asarray(assignment)
    if labels.ndim != 1 or labels.shape != assignment.shape or not len(labels):
        raise ValueError(
            f"labels have shape {labels.shape} and the assignment {assignment.shape}: give one "
            "label and one cluster for each item"
        )
    sides = (np.unique(x, return_inverse=True)[1] for x in (labels, assignment))
    (classes, class_sizes), (clusters, cluster_sizes) = ((x, np.bincount(x)) for x in sides)
    k = len(cluster_sizes)
    cells, cell_sizes = np.unique(classes * k + clusters, return_counts=True)
    products = class_sizes[cells // k].astype(np.float64) * cluster_sizes[cells % k]
    return _Contingency(class_sizes, cluster_sizes, cell_sizes, products)


def _entropy(sizes: Int[np.ndarray, "c"]) -> float:
    p = sizes / sizes.sum()
    return float(-np.sum(p * np.log(p)))


def _expected_information(
    class_sizes: Int[np.ndarray, "c"], cluster_sizes: Int[np.ndarray, "k"]
) -> float:
    """Computes the mean mutual information of two random partitions with these sizes.

    It is a sum over pairs of a class and a cluster, and a term depends only on their sizes. Among
    thousands of classes few sizes are distinct, so each distinct pair of sizes is computed once.
    """
    n = int(class_sizes.sum())
    log_factorial = np.array([math.lgamma(i + 1) for i in range(n + 1)])
    total = 0.0
    for a, a_times in zip(*np.unique(class_sizes, return_counts=True), strict=True):
        for b, b_times in zip(*np.unique(cluster_sizes, return_counts=True), strict=True):
            m = np.arange(max(1, a + b - n), min(a, b) + 1)
            # The probability that m of the a items fall among the b items is hypergeometric.
            log_p = (
                log_factorial[[a, b, n - a, n - b]].sum() - log_factorial[n]
                - log_factorial[m] - log_factorial[a - m] - log_factorial[b - m]
                - log_factorial[n - a - b + m]
            )  # fmt: skip
            terms = m / n * (np.log(n * m) - np.log(a) - np.log(b)) * np.exp(log_p)
            total += a_times * b_times * float(terms.sum())
    return total
