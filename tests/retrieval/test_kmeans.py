"""k-means against plain loops."""

import concurrent.futures
import threading

import numpy as np
import pytest
from search_loops import all_similarities, lattice
from sklearn.cluster import KMeans
from sklearn.cluster._kmeans import _kmeans_plusplus
from sklearn.metrics import normalized_mutual_info_score

from dmljax import metrics, retrieval
from dmljax.retrieval import clusters


def _assert_is_stable(x, clusters, k):
    """Every center is the mean of its points, and every point is with its nearest center."""
    for c in range(k):
        mean = x[clusters.assignment == c].mean(0)
        np.testing.assert_allclose(clusters.centers[c], mean, atol=1e-5)
    distances = ((x[:, None] - clusters.centers[None]) ** 2).sum(-1)
    to_center = distances[np.arange(len(x)), clusters.assignment]
    np.testing.assert_allclose(to_center, distances.min(1), atol=1e-5)
    np.testing.assert_allclose(clusters.inertia, to_center.sum(), rtol=1e-5)


@pytest.mark.parametrize("n, k", [(300, 1), (300, 40), (140, 139)])
def test_kmeans_ends_when_no_point_moves(n, k):
    x = np.random.default_rng(n).standard_normal((n, 5)).astype(np.float32)
    result = retrieval.kmeans(x, k=k, seed=1, tile=128)
    assert np.bincount(result.assignment, minlength=k).min() > 0
    _assert_is_stable(x, result, k)
    other = retrieval.kmeans(x, k=k, seed=2, tile=128).assignment
    assert k == 1 or (result.assignment != other).any()


def test_kmeans_skips_only_distances_that_cannot_change():
    """The loop compares every point with every center; the start and the rule for ties agree."""
    rng = np.random.default_rng(9)
    x = lattice(rng, 400, d=4, top=6)
    for iterations in (1, 2, 3, 5, 8):
        result = retrieval.kmeans(x, k=40, seed=2, iterations=iterations, tile=128)
        start = retrieval.kmeans(x, k=40, seed=2, iterations=1, tile=128)
        assignment, centers = start.assignment, start.centers
        for _ in range(iterations - 1):
            similarities = all_similarities(x, centers)
            # A point may stay with a center that is as near up to rounding.
            lead = similarities.max(1) - similarities[np.arange(400), assignment]
            nearest = np.where(lead < 1e-6, assignment, similarities.argmax(1))
            assert np.bincount(nearest, minlength=40).min() > 0
            if (nearest == assignment).all():
                break
            assignment = nearest
            centers = np.stack([x[assignment == c].mean(0) for c in range(40)])
        np.testing.assert_array_equal(result.assignment, assignment)


@pytest.mark.parametrize("seed", range(3))
def test_of_equally_near_centers_the_first_counts_whether_it_moved_or_not(seed):
    rng = np.random.default_rng(seed)
    points, centers, new = (lattice(rng, n, d=2, top=4) for n in (90, 12, 12))
    has_moved = rng.random(12) < 0.4
    search = clusters._Points(points, 128)
    similarities, assignment = search.closest(centers)
    centers[has_moved] = new[has_moved]
    is_kept = ~has_moved[assignment]
    search.reassign(centers, has_moved, is_kept, assignment, similarities)
    exact = all_similarities(points, centers)
    np.testing.assert_array_equal(assignment, exact.argmax(axis=1))
    np.testing.assert_array_equal(similarities, exact.max(axis=1) + (points**2).sum(axis=1) / 2)


def test_starts_drawn_in_batches_have_the_distribution_of_one_by_one():
    # Eight places on a line: how often each is among five starts, against a plain loop.
    x = np.array([0, 1, 2, 4, 7, 11, 16, 22], np.float32)[:, None]
    points = clusters._Points(x, 128)

    def plain(rng):
        chosen = [rng.integers(8)]
        while len(chosen) < 5:
            p = ((x - x[chosen].T) ** 2).min(1)
            chosen.append(rng.choice(8, p=p / p.sum()))
        return chosen

    draws = 200
    batched, one_by_one = np.zeros(8), np.zeros(8)
    for seed in range(draws):
        batched[points.draw(5, np.random.default_rng(seed))] += 1
        one_by_one[plain(np.random.default_rng(10_000 + seed))] += 1
    np.testing.assert_allclose(batched / draws, one_by_one / draws, atol=4 * np.sqrt(0.5 / draws))


def test_an_empty_cluster_takes_the_farthest_point():
    x = np.array([[0.0], [1.0], [10.0], [11.0], [30.0]])
    assignment = np.array([0, 0, 1, 1, 1])
    centers = np.array([[0.5], [17.0], [-99.0]])
    refilled = clusters._fill_empty(x, centers, assignment, (x[:, 0] - centers[assignment, 0]) ** 2)
    assert refilled.tolist() == [2] and assignment.tolist() == [0, 0, 1, 1, 2]
    # No cluster gives its only point away: the next one is taken.
    assignment, centers = np.array([0, 0, 1, 1, 3]), np.array([[0.5], [13.0], [-99.0], [20.0]])
    refilled = clusters._fill_empty(x, centers, assignment, (x[:, 0] - centers[assignment, 0]) ** 2)
    assert refilled.tolist() == [2] and assignment.tolist() == [0, 0, 2, 1, 3]


def test_kmeans_with_fewer_points_than_clusters_ends():
    x = np.repeat(np.random.default_rng(12).standard_normal((5, 3)), 20, axis=0)
    result = retrieval.kmeans(x, k=9, seed=0)
    assert len(np.unique(result.assignment)) == 5 and result.inertia == 0


def test_of_several_starts_the_least_inertia_counts():
    """Against scikit-learn's iterations from the same starts, of which its inertia chooses."""
    rng = np.random.default_rng(3)
    truth = np.repeat(np.arange(30), 12)
    centers = 1.5 * rng.standard_normal((30, 8))
    x = (centers[truth] + rng.standard_normal((len(truth), 8))).astype(np.float32)
    origin = x.mean(axis=0, dtype=np.float64)  # `kmeans` computes relative to it
    points = (x - origin).astype(np.float32)
    draws, search = np.random.default_rng(5), clusters._Points(points, 384)
    runs = []
    for _ in range(6):
        start = points[search.draw(30, draws)]
        runs.append(KMeans(30, init=start, n_init=1, tol=0, algorithm="lloyd").fit(points))
    inertias = [run.inertia_ for run in runs]
    best = int(np.argmin(inertias))
    assert best > 0  # so that another start than the first one is chosen
    ours = retrieval.kmeans(x, k=30, seed=5, starts=6)
    np.testing.assert_allclose(ours.inertia, inertias[best], rtol=1e-5)
    nmi = metrics.clustering(x, truth, seeds=(5,), starts=6)["NMI"]
    expected = normalized_mutual_info_score(truth, runs[best].labels_)
    np.testing.assert_allclose(nmi, expected, rtol=1e-9)
    # Of equal inertias the earliest counts: here the starts differ in the order of clusters alone.
    line = np.array([[0.0], [2.0], [10.0], [12.0]])
    for seed in range(8):
        several, one = (retrieval.kmeans(line, k=2, seed=seed, starts=n) for n in (4, 1))
        np.testing.assert_array_equal(several.assignment, one.assignment)
    with pytest.raises(ValueError, match="must be at least 1, got 0 and 1"):
        retrieval.kmeans(x, k=30, starts=0)


def test_greedy_starts_are_those_of_scikit_learn():
    """From the same random numbers."""
    x = np.random.default_rng(4).standard_normal((300, 5)).astype(np.float32)

    class Draws:
        """Our generator behind the two functions that scikit-learn calls."""

        rng = np.random.default_rng(9)

        def choice(self, n, p):
            return self.rng.integers(n)

        def uniform(self, size):
            return self.rng.random(size)

    _, expected = _kmeans_plusplus(
        x.astype(np.float64), 20, np.vecdot(x, x).astype(np.float64), np.ones(300), Draws()
    )
    actual = clusters._Points(x, 128).draw_greedily(20, np.random.default_rng(9), trials=4)
    np.testing.assert_array_equal(actual, expected)
    ours = retrieval.kmeans(x, k=20, **metrics.SCIKIT_LEARN_KMEANS)
    assert ours.inertia != retrieval.kmeans(x, k=20, iterations=300).inertia
    explicit = retrieval.kmeans(
        x, k=20, **metrics.SCIKIT_LEARN_KMEANS | {"trials": 2 + 2}
    )  # log 20
    assert ours.inertia == explicit.inertia
    with pytest.raises(ValueError, match="got 1 and 0: give trials=None for 2 \\+ log k"):
        retrieval.kmeans(x, k=4, trials=0)


def test_a_tolerance_ends_the_iterations_where_scikit_learn_ends():
    rng = np.random.default_rng(7)
    x = (rng.standard_normal((500, 3)) + np.array([0.4, -0.4, 0.4])).astype(np.float32)
    origin = x.mean(axis=0, dtype=np.float64)
    points = (x - origin).astype(np.float32)
    start = points[clusters._Points(points, 512).draw(10, np.random.default_rng(0))]
    for tolerance in (0.4, 0.09, 1e-2, 0.0):  # the centers move by 0.41 and 0.092
        reference = KMeans(10, init=start, n_init=1, tol=tolerance, algorithm="lloyd").fit(points)
        ours = retrieval.kmeans(x, k=10, tolerance=tolerance)
        np.testing.assert_array_equal(ours.assignment, reference.labels_)


def test_hosts_that_share_the_points_find_the_clusters_of_one_host(hosts=3):
    """Threads stand for hosts, and add their arrays as `train.hosts.summed` does."""
    x = np.random.default_rng(13).standard_normal((400, 6)).astype(np.float32)
    one = retrieval.kmeans(x, k=40, seed=3, tile=128)
    barrier, arrays, filled = threading.Barrier(hosts), {}, []

    def host(i):
        def sum_fn(array):
            arrays[i] = array
            filled.append(np.any(array, axis=0).mean())
            barrier.wait(60)
            total = sum(arrays[j] for j in range(hosts))
            barrier.wait(60)
            return total

        share = {"share": (i, hosts), "sum_fn": sum_fn}
        return retrieval.kmeans(x, k=40, seed=3, tile=128, **share)

    with concurrent.futures.ThreadPoolExecutor(hosts) as pool:
        results = list(pool.map(host, range(hosts)))
    for result in results:
        np.testing.assert_array_equal(result.assignment, one.assignment)
        np.testing.assert_array_equal(result.centers, one.centers)
        assert result.inertia == one.inertia
    assert filled[0] < 0.5  # of the first search, of all points
    with pytest.raises(ValueError, match="share and sum_fn go together"):
        retrieval.kmeans(x, k=2, share=(0, 2))
