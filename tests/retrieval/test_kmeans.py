"""k-means against plain loops."""

import itertools

import numpy as np
import pytest
from search_loops import all_similarities, lattice

from dmljax import retrieval
from dmljax.retrieval import clusters, tiles


def _is_stable(x, found, k):
    """Whether every center is its members' mean and every point is with its nearest center."""
    for c in range(k):
        np.testing.assert_allclose(found.centers[c], x[found.assignment == c].mean(0), atol=1e-5)
    gaps = ((x[:, None] - found.centers[None]) ** 2).sum(-1)
    own = gaps[np.arange(len(x)), found.assignment]
    np.testing.assert_allclose(own, gaps.min(1), atol=1e-5)
    np.testing.assert_allclose(found.inertia, own.sum(), rtol=1e-5)


@pytest.mark.parametrize("n, k", [(300, 1), (300, 7), (500, 200), (140, 139), (64, 64)])
def test_kmeans_ends_where_nothing_moves(n, k):
    x = np.random.default_rng(n).standard_normal((n, 5)).astype(np.float32)
    found = retrieval.kmeans(x, k=k, seed=1, tile=128)
    assert np.bincount(found.assignment, minlength=k).min() > 0
    _is_stable(x, found, k)


def test_kmeans_skips_only_what_cannot_change(monkeypatch):
    # The referee searches all centers in every iteration; start and ties are the same.
    rng = np.random.default_rng(9)
    x = lattice(rng, 400, d=4, top=6)
    for iterations in (1, 2, 3, 5, 8):
        found = retrieval.kmeans(x, k=40, seed=2, iterations=iterations, tile=128)
        start = retrieval.kmeans(x, k=40, seed=2, iterations=1, tile=128)
        assignment, centers = start.assignment, start.centers
        for _ in range(iterations - 1):
            scores = all_similarities(x, centers)
            again = scores.argmax(1)
            # A point may stay with a center that is as near up to rounding.
            kept = scores.max(1) - scores[np.arange(400), assignment] < 1e-6
            again = np.where(kept, assignment, again)
            assert np.bincount(again, minlength=40).min() > 0
            if (again == assignment).all():
                break
            assignment = again
            centers = np.stack([x[assignment == c].mean(0) for c in range(40)])
        np.testing.assert_array_equal(found.assignment, assignment)


def test_kmeans_is_the_same_for_a_seed_and_another_for_another():
    x = np.random.default_rng(10).standard_normal((300, 8)).astype(np.float32)
    runs = [retrieval.kmeans(x, k=30, seed=s) for s in (0, 0, 1)]
    np.testing.assert_array_equal(runs[0].centers, runs[1].centers)
    np.testing.assert_array_equal(runs[0].assignment, runs[1].assignment)
    assert (runs[0].assignment != runs[2].assignment).any()


def test_kmeans_finds_clusters_that_lie_apart():
    rng = np.random.default_rng(11)
    truth = rng.integers(0, 50, 1000)
    x = 1000.0 + 100 * rng.standard_normal((50, 6))[truth] + rng.standard_normal((1000, 6))
    found = retrieval.kmeans(x, k=50, seed=0, tile=128).assignment
    # A k-means++ start may split one cluster and join two others, seldom more.
    assert len(set(zip(truth.tolist(), found.tolist(), strict=True))) <= 54


def test_starts_follow_the_squared_distances():
    # Three places: 0 (many), 1 and 3. Exactly: first place, then p ~ squared distance.
    x = np.array([[0.0]] * 8 + [[1.0], [3.0]], np.float32)
    rows, squares = tiles.plain_tiles(x, 128), (x[:, 0] ** 2).astype(np.float64)
    counts = dict.fromkeys(itertools.product((0, 1, 3), repeat=2), 0)
    for seed in range(500):
        rng = np.random.default_rng(seed)
        first, second = clusters._draw_starts(x, rows, squares, 2, rng, 128)
        counts[int(x[first, 0]), int(x[second, 0])] += 1
    for a, share in ((0, 0.8), (1, 0.1), (3, 0.1)):
        weights = {b: (8 if b == 0 else 1) * (a - b) ** 2 for b in (0, 1, 3)}
        for b, weight in weights.items():
            p = share * weight / sum(weights.values())
            assert abs(counts[a, b] / 500 - p) <= 4 * np.sqrt(p * (1 - p) / 500)


def test_starts_drawn_in_batches_follow_the_law_of_one_by_one():
    # Eight places on a line, and the law of the set of four starts, against the plain loop.
    x = np.array([0, 1, 2, 4, 7, 11, 16, 22], np.float32)[:, None]
    rows, squares = tiles.plain_tiles(x, 128), (x[:, 0] ** 2).astype(np.float64)

    def plain(rng):
        chosen = [rng.integers(8)]
        while len(chosen) < 5:
            p = ((x - x[chosen].T) ** 2).min(1)
            chosen.append(rng.choice(8, p=p / p.sum()))
        return chosen

    draws = 500
    ours, theirs = np.zeros(8), np.zeros(8)
    for seed in range(draws):
        ours[clusters._draw_starts(x, rows, squares, 5, np.random.default_rng(seed), 128)] += 1
        theirs[plain(np.random.default_rng(10_000 + seed))] += 1
    np.testing.assert_allclose(ours / draws, theirs / draws, atol=4 * np.sqrt(0.5 / draws))


def test_an_empty_cluster_takes_the_farthest_point():
    x = np.array([[0.0], [1.0], [10.0], [11.0], [30.0]])
    assignment = np.array([0, 0, 1, 1, 1])
    centers = np.array([[0.5], [17.0], [-99.0]])
    filled = clusters._fill_empty(x, centers, assignment, (x[:, 0] - centers[assignment, 0]) ** 2)
    assert filled.tolist() == [2] and assignment.tolist() == [0, 0, 1, 1, 2]


def test_kmeans_with_fewer_points_than_clusters_ends():
    x = np.repeat(np.random.default_rng(12).standard_normal((5, 3)), 20, axis=0)
    found = retrieval.kmeans(x, k=9, seed=0)
    assert len(np.unique(found.assignment)) == 5 and found.inertia == 0
