"""Clustering scores against loops over all pairs of items, and against scikit-learn."""

import itertools
import math
import time

import numpy as np
import pytest

from dmljax import metrics

PARTITIONS = {
    "random": lambda rng: (rng.integers(0, 9, 300), rng.integers(0, 12, 300)),
    "close": lambda rng: (a := rng.integers(0, 9, 300), np.where(rng.random(300) < 0.2, 3, a)),
    "many": lambda rng: (a := rng.integers(0, 900, 3000), a // 2 + (rng.random(3000) < 0.1)),
    "unbalanced": lambda rng: (a := (rng.pareto(1, 2000)).astype(int) - 5, a // 3),
    "renamed": lambda rng: (a := rng.integers(0, 9, 100), 100 - a),
    "one class": lambda rng: (np.zeros(50, int), rng.integers(0, 3, 50)),
    "one cluster": lambda rng: (rng.integers(0, 3, 50), np.zeros(50, int)),
    "one of each": lambda rng: (np.zeros(9, int), np.ones(9, int)),
    "singletons": lambda rng: (np.arange(50), rng.integers(0, 5, 50)),
    "singletons twice": lambda rng: (np.arange(50), np.arange(50)[::-1]),
}
CLUSTERING_FNS = {
    "nmi": metrics.nmi,
    "ami": metrics.ami,
    "ari": metrics.ari,
    "pairwise_f1": metrics.pairwise_f1,
}


def test_all_public_functions_of_clusterings_are_tested():
    assert set(CLUSTERING_FNS) == set(metrics.clusters.__all__) - {"class_deviation"}


@pytest.mark.parametrize("name", PARTITIONS)
def test_scores_are_those_of_scikit_learn(name):
    from sklearn import metrics as sklearn_metrics

    labels, assignment = PARTITIONS[name](np.random.default_rng(3))
    for score_fn, peer in (
        (metrics.nmi, sklearn_metrics.normalized_mutual_info_score),
        (metrics.ami, sklearn_metrics.adjusted_mutual_info_score),
        (metrics.ari, sklearn_metrics.adjusted_rand_score),
    ):
        expected = peer(labels, assignment)
        np.testing.assert_allclose(score_fn(labels, assignment), expected, atol=1e-9)


def _pairs(labels, assignment):
    same_both = same_class = same_cluster = count = 0
    for i, j in itertools.combinations(range(len(labels)), 2):
        count += 1
        same_class += labels[i] == labels[j]
        same_cluster += assignment[i] == assignment[j]
        same_both += labels[i] == labels[j] and assignment[i] == assignment[j]
    return same_both, same_class, same_cluster, count


def _naive_nmi(labels, assignment):
    def entropy(items):
        shares = [items.count(item) / len(items) for item in set(items)]
        return -sum(p * math.log(p) for p in shares)

    labels, assignment = list(labels), list(assignment)
    pairs = list(zip(labels, assignment, strict=True))
    apart = entropy(labels) + entropy(assignment)
    return 2 * (apart - entropy(pairs)) / apart


def _naive_ami(labels, assignment):
    """The mean of the information over every permutation of the assignment."""
    half = _naive_nmi(labels, assignment)
    chance = [_naive_nmi(labels, p) for p in itertools.permutations(assignment)]
    return (half - np.mean(chance)) / (1 - np.mean(chance))


def _naive_ari(labels, assignment):
    same_both, same_class, same_cluster, count = _pairs(labels, assignment)
    chance = same_class * same_cluster / count
    return (same_both - chance) / ((same_class + same_cluster) / 2 - chance)


def _naive_f1(labels, assignment):
    same_both, same_class, same_cluster, _ = _pairs(labels, assignment)
    precision, recall = same_both / same_cluster, same_both / same_class
    return 2 * precision * recall / (precision + recall)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "name, naive, size",
    [
        ("nmi", _naive_nmi, 60),
        ("ami", _naive_ami, 6),
        ("ari", _naive_ari, 60),
        ("pairwise_f1", _naive_f1, 60),
    ],
)
def test_scores_are_those_of_loops_over_pairs(name, naive, size, seed):
    rng = np.random.default_rng(seed)
    labels = np.append(rng.integers(0, 3, size - 2), [0, 0])
    assignment = np.append(rng.integers(5, 8, size - 2), [5, 5])
    score = CLUSTERING_FNS[name](labels, assignment)
    assert isinstance(score, float)
    np.testing.assert_allclose(score, naive(labels, assignment), atol=1e-9)


@pytest.mark.parametrize("name", CLUSTERING_FNS)
def test_bad_input_is_named(name):
    labels = np.array([0, 0, 1, 1, 2, 2])
    with pytest.raises(ValueError, match=r"shape \(6,\) and the assignment \(4,\)"):
        CLUSTERING_FNS[name](labels, labels[:4])
    with pytest.raises(ValueError, match=r"shape \(0,\)"):
        CLUSTERING_FNS[name](labels[:0], labels[:0])


def test_eleven_thousand_classes_are_quick():
    """Summing over all pairs of a class and a cluster takes 26 s for the adjusted score."""
    rng = np.random.default_rng(2)
    labels = np.arange(60_502) % 11_316
    assignment = np.where(rng.random(60_502) < 0.6, labels, rng.integers(0, 11_316, 60_502))
    start = time.process_time()
    assert 0 < metrics.ami(labels, assignment) < 1
    assert time.process_time() - start < 3


def _naive_deviation(x, labels):
    mean = sum(x) / len(x)
    within = between = 0.0
    for row, label in zip(x, labels, strict=True):
        members = [other for other, name in zip(x, labels, strict=True) if name == label]
        center = sum(members) / len(members)
        within += sum((row - center) ** 2)
        between += sum((center - mean) ** 2)
    return (within / between) ** 0.5


@pytest.mark.parametrize("seed", range(2))
def test_class_deviation_against_loops(seed):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 5, 40) * 1000 - 7
    x = rng.normal(size=(40, 3)) * 3 + labels[:, None] / 500
    deviation = metrics.class_deviation(x, labels)
    assert isinstance(deviation, float)
    np.testing.assert_allclose(deviation, _naive_deviation(x, labels), rtol=1e-12)
    # Neither place, nor scale, nor a rotation, nor the order counts.
    turn = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    order = rng.permutation(40)
    np.testing.assert_allclose(
        metrics.class_deviation((5 * x @ turn + 9)[order], labels[order]), deviation, rtol=1e-9
    )


def test_class_deviation_at_its_limits():
    x = np.array([[0.0], [0.0], [2.0], [2.0]])
    assert metrics.class_deviation(x, np.array([0, 0, 1, 1])) == 0
    assert metrics.class_deviation(x, np.array([0, 1, 0, 1])) == np.inf
    assert np.isnan(metrics.class_deviation(x * 0, np.array([0, 1, 0, 1])))
    with pytest.raises(ValueError, match=r"labels have shape \(3,\)"):
        metrics.class_deviation(x, np.arange(3))
