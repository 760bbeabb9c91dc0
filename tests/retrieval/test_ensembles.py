"""Ranks by the mean of the learners' distances, against sorted lists in float64."""

import numpy as np
import pytest

from dmljax import retrieval


def _naive(learners, labels, gallery=None, gallery_labels=None):
    items = learners if gallery is None else gallery
    item_labels = labels if gallery is None else gallery_labels
    ranks = {}
    for i, query in enumerate(learners):
        distances = [np.linalg.norm(query - item, axis=1).mean() for item in items]
        others = [j for j in range(len(items)) if gallery is not None or j != i]
        # Of equals the negative is ahead.
        others.sort(key=lambda j: (distances[j], item_labels[j] == labels[i]))
        hits = [rank for rank, j in enumerate(others, 1) if item_labels[j] == labels[i]]
        if hits:
            ranks[i] = hits
    return ranks


def _ranks(*args, **options):
    return {
        int(query): [int(rank) for rank in row if rank]
        for block in retrieval.mean_distance_ranks(*args, **options)
        for query, row in zip(block.queries, block.ranks, strict=True)
    }


@pytest.mark.parametrize("rows", [7, 256])
def test_ranks_are_those_of_sorted_lists(rows):
    rng = np.random.default_rng(0)
    learners = rng.normal(size=(40, 3, 4))
    labels = np.append(rng.integers(0, 6, 39), 99)  # the last has no positive
    learners[5] = learners[6]  # a tie in distance to all others
    assert _ranks(learners, labels, rows=rows) == _naive(learners, labels)


def test_a_gallery_of_its_own():
    rng = np.random.default_rng(1)
    queries, gallery = rng.normal(size=(9, 2, 3)), rng.normal(size=(30, 2, 3))
    labels, gallery_labels = rng.integers(0, 4, 9), rng.integers(0, 4, 30)
    options = {"gallery": gallery, "gallery_labels": gallery_labels}
    assert _ranks(queries, labels, **options) == _naive(queries, labels, **options)
    with pytest.raises(ValueError, match=r"\(9, 2, 3\) and \(30, 2, 2\)"):
        next(retrieval.mean_distance_ranks(queries, labels, gallery=gallery[:, :, :2]))


def test_it_is_another_ranking_than_that_of_the_concatenated_vectors():
    """Distances 1 + 1 against 0 + 1.9: the sum prefers the second, the sum of squares the first."""
    learners = np.array([[[0.0], [0.0]], [[1.0], [1.0]], [[0.0], [1.9]]])
    labels = np.array([0, 0, 1])
    assert _ranks(learners, labels)[0] == [2]
    block = next(retrieval.ranks(learners.reshape(3, 2), labels))
    assert dict(zip(block.queries.tolist(), block.ranks[:, 0].tolist(), strict=True))[0] == 1
