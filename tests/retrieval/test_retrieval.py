"""Ranks, neighbours and clusters against loops over all pairs in double precision."""

import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dmljax import retrieval
from dmljax.retrieval import clusters, search, tiles


def _similarities(queries, gallery, name="euclidean"):
    """[q n] in double precision, by definition."""
    queries, gallery = np.asarray(queries, np.float64), np.asarray(gallery, np.float64)
    if name == "euclidean":
        return -0.5 * ((queries[:, None] - gallery[None]) ** 2).sum(-1)
    norms = [np.linalg.norm(x, axis=1, keepdims=True) for x in (queries, gallery)]
    queries, gallery = (
        x / np.where(n > 0, n, 1) for x, n in zip((queries, gallery), norms, strict=True)
    )
    return queries @ gallery.T


def _naive(similarities, labels, gallery_labels, *, same):
    """{query: ranks of its positives}, by counting."""
    out = {}
    for i, row in enumerate(similarities):
        others = np.arange(len(row)) != (i if same else -1)
        positives = np.sort(row[others & (gallery_labels == labels[i])])[::-1]
        negatives = row[others & (gallery_labels != labels[i])]
        if len(positives):
            out[i] = [n + 1 + int((negatives >= p).sum()) for n, p in enumerate(positives)]
    return out


def _ranks(*args, **kwargs):
    out = {}
    for block in retrieval.ranks(*args, **kwargs):
        for query, row in zip(block.queries.tolist(), block.ranks, strict=True):
            assert query not in out and (row > 0).sum() == np.flatnonzero(row > 0)[-1] + 1
            out[query] = row[row > 0].tolist()
    return out


def _lattice(rng, n, d=3, top=3):
    """Small whole numbers: many duplicates and ties, and all arithmetic is exact."""
    return rng.integers(0, top, (n, d)).astype(np.float32)


@pytest.mark.parametrize("n, classes", [(2, 1), (40, 5), (128, 60), (300, 2), (700, 9), (400, 400)])
def test_ranks_within_one_set(n, classes):
    rng = np.random.default_rng(n)
    x, y = _lattice(rng, n), rng.integers(0, classes, n)
    expected = _naive(_similarities(x, x), y, y, same=True)
    assert _ranks(x, y, tile=128) == expected
    assert _ranks(x, y) == expected


@pytest.mark.parametrize("q, n, classes", [(30, 200, 7), (300, 90, 3), (1, 500, 2), (260, 260, 90)])
def test_ranks_in_a_gallery(q, n, classes):
    rng = np.random.default_rng(q)
    x, y = _lattice(rng, q), rng.integers(0, classes, q)
    g, z = _lattice(rng, n), rng.integers(1, classes + 1, n)
    expected = _naive(_similarities(x, g), y, z, same=False)
    assert _ranks(x, y, gallery=g, gallery_labels=z, tile=128) == expected


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 4), st.integers(0, 9), st.booleans())
def test_ranks_of_any_lattice(n, classes, top, seed, split):
    rng = np.random.default_rng(seed)
    x, y = _lattice(rng, n, top=top), rng.integers(0, classes, n)
    g, z = (_lattice(rng, 50, top=top), rng.integers(0, classes, 50)) if split else (None, None)
    expected = _naive(
        _similarities(x, x if g is None else g), y, y if z is None else z, same=not split
    )
    assert _ranks(x, y, gallery=g, gallery_labels=z) == expected


@pytest.mark.parametrize("sorted_from", [1, 10**6])
@pytest.mark.parametrize("split", [False, True])
def test_counting_and_sorting_agree(monkeypatch, sorted_from, split):
    rng = np.random.default_rng(3)
    x, y = _lattice(rng, 500, d=4), np.sort(rng.integers(0, 12, 500)) ** 2 % 7
    gallery = {"gallery": x[::-1], "gallery_labels": y[::-1]} if split else {}
    monkeypatch.setattr(search, "_SORTED_FROM", sorted_from)
    monkeypatch.setattr(search, "_STRIP", 20_000)  # several strips
    g, z = (x[::-1], y[::-1]) if split else (x, y)
    expected = _naive(_similarities(x, g), y, z, same=not split)
    assert _ranks(x, y, **gallery, tile=128) == expected


@pytest.mark.parametrize("symmetric", [True, False])
def test_mirrored_products_change_nothing(monkeypatch, symmetric):
    rng = np.random.default_rng(4)
    x, y = rng.standard_normal((600, 17), dtype=np.float32), rng.integers(0, 150, 600)
    monkeypatch.setattr(search, "_symmetric", lambda tile: symmetric)
    assert _ranks(x, y, tile=128) == _naive(_similarities(x, x), y, y, same=True)


@pytest.mark.parametrize("d", [1, 5, 64, 129, 512])
@pytest.mark.parametrize("name", ["euclidean", "cosine"])
def test_duplicates_are_tied_whatever_tile_they_are_in(d, name):
    # Rounding must be the same wherever a pair sits: seven points, copied all over.
    rng = np.random.default_rng(d)
    which, y = rng.integers(0, 7, 400), rng.integers(0, 30, 400)
    points = rng.standard_normal((7, d), dtype=np.float32)
    exact = _similarities(points, points, name)
    if d == 1 and name == "cosine":
        exact = np.sign(points) @ np.sign(points).T
    expected = _naive(exact[which][:, which], y, y, same=True)
    assert _ranks(points[which], y, similarity_fn=getattr(retrieval, name), tile=128) == expected


def test_euclidean_is_not_cosine_and_survives_an_offset():
    rng = np.random.default_rng(5)
    x = rng.standard_normal((200, 8)) * rng.uniform(0.1, 5, (200, 1))
    y = rng.integers(0, 40, 200)
    euclidean = _naive(_similarities(x, x), y, y, same=True)
    cosine = _naive(_similarities(x, x, "cosine"), y, y, same=True)
    assert euclidean != cosine
    assert _ranks(x, y) == euclidean
    assert _ranks(x, y, similarity_fn=retrieval.cosine) == cosine
    far = (np.round(x * 64) / 64 + 4096).astype(np.float32)  # exact in float32, its square is not
    assert _ranks(far, y) == _naive(_similarities(far, far), y, y, same=True)


def test_labels_are_compared_as_integers():
    x = np.array([[0.0], [1.0], [1.1], [5.0]])
    for base in (2**24, 2**53, -(2**62)):
        y = np.array([base, base + 1, base, base + 1])
        assert _ranks(x, y) == {0: [2], 1: [3], 2: [2], 3: [2]}


def test_every_kind_of_array(tmp_path):
    rng = np.random.default_rng(6)
    x, y = _lattice(rng, 150), rng.integers(0, 30, 150)
    expected = _naive(_similarities(x, x), y, y, same=True)
    np.save(tmp_path / "x.npy", x)
    kinds = [np.load(tmp_path / "x.npy", mmap_mode="r"), jnp.asarray(x), np.asfortranarray(x)]
    kinds += [x.astype(t) for t in (np.float64, np.float16, ml_dtypes.bfloat16, np.uint8, np.int64)]
    for kind in kinds:
        assert _ranks(kind, y) == expected
        assert _ranks(kind, jnp.asarray(y)) == expected


def test_double_precision_stays_double():
    x = np.array([[0.0], [1.0], [1.0 + 1e-12]])
    y = np.array([0, 0, 1])
    assert _ranks(x, y)[0] == [2]  # in single precision the negative is tied
    with jax.enable_x64(True):
        assert _ranks(x, y)[0] == [1]
        assert retrieval.nearest(x, k=1)[1].dtype == np.float64


def test_nothing_of_size_queries_by_gallery(monkeypatch):
    shapes = set()

    def watched(real, rows, columns):
        out = real(rows, columns)
        shapes.add(out.shape)
        return out

    for module, name in ((tiles, "similarities"), (search, "_negatives")):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, functools.partial(watched, real))
    rng = np.random.default_rng(7)
    _ranks(rng.standard_normal((900, 4)), rng.integers(0, 200, 900), tile=128)
    assert shapes == {(128, 128)}


@pytest.mark.parametrize("k", [1, 5, 200])
@pytest.mark.parametrize("name", ["euclidean", "cosine"])
def test_nearest(k, name):
    rng = np.random.default_rng(8)
    q, g = rng.standard_normal((150, 6)), rng.standard_normal((200, 6))
    indices, similarities = retrieval.nearest(
        q, g, k=k, similarity_fn=getattr(retrieval, name), tile=128
    )
    expected = _similarities(q, g, name)
    np.testing.assert_array_equal(indices, np.argsort(-expected, axis=1)[:, :k])
    np.testing.assert_allclose(similarities, -np.sort(-expected, axis=1)[:, :k], atol=1e-5)


def test_nearest_excludes_oneself_and_orders_ties_by_index():
    x = np.zeros((300, 2))
    indices, similarities = retrieval.nearest(x, k=3, tile=128)
    expected = [[j for j in range(5) if j != i][:3] for i in range(300)]
    np.testing.assert_array_equal(indices, expected)
    np.testing.assert_array_equal(similarities, 0)
    assert retrieval.nearest(x, x, k=1)[0].tolist() == [[0]] * 300


def _is_stable(x, found, k):
    """Whether every centre is its members' mean and every point is with its nearest centre."""
    for c in range(k):
        np.testing.assert_allclose(found.centres[c], x[found.assignment == c].mean(0), atol=1e-5)
    gaps = ((x[:, None] - found.centres[None]) ** 2).sum(-1)
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
    # The referee searches all centres in every iteration; start and ties are the same.
    rng = np.random.default_rng(9)
    x = _lattice(rng, 400, d=4, top=6)
    for iterations in (1, 2, 3, 5, 8):
        found = retrieval.kmeans(x, k=40, seed=2, iterations=iterations, tile=128)
        start = retrieval.kmeans(x, k=40, seed=2, iterations=1, tile=128)
        assignment, centres = start.assignment, start.centres
        for _ in range(iterations - 1):
            scores = _similarities(x, centres)
            again = scores.argmax(1)
            # A point may stay with a centre that is as near up to rounding.
            kept = scores.max(1) - scores[np.arange(400), assignment] < 1e-6
            again = np.where(kept, assignment, again)
            assert np.bincount(again, minlength=40).min() > 0
            if (again == assignment).all():
                break
            assignment = again
            centres = np.stack([x[assignment == c].mean(0) for c in range(40)])
        np.testing.assert_array_equal(found.assignment, assignment)


def test_kmeans_is_the_same_for_a_seed_and_another_for_another():
    x = np.random.default_rng(10).standard_normal((300, 8)).astype(np.float32)
    runs = [retrieval.kmeans(x, k=30, seed=s) for s in (0, 0, 1)]
    np.testing.assert_array_equal(runs[0].centres, runs[1].centres)
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
    rows, squares = tiles.plain(x, 128), (x[:, 0] ** 2).astype(np.float64)
    counts = dict.fromkeys(itertools.product((0, 1, 3), repeat=2), 0)
    for seed in range(500):
        rng = np.random.default_rng(seed)
        first, second = clusters._seeds(x, rows, squares, 2, rng, 128)
        counts[int(x[first, 0]), int(x[second, 0])] += 1
    for a, share in ((0, 0.8), (1, 0.1), (3, 0.1)):
        weights = {b: (8 if b == 0 else 1) * (a - b) ** 2 for b in (0, 1, 3)}
        for b, weight in weights.items():
            p = share * weight / sum(weights.values())
            assert abs(counts[a, b] / 500 - p) <= 4 * np.sqrt(p * (1 - p) / 500)


def test_starts_drawn_in_batches_follow_the_law_of_one_by_one():
    # Eight places on a line, and the law of the set of four starts, against the plain loop.
    x = np.array([0, 1, 2, 4, 7, 11, 16, 22], np.float32)[:, None]
    rows, squares = tiles.plain(x, 128), (x[:, 0] ** 2).astype(np.float64)

    def plain(rng):
        chosen = [rng.integers(8)]
        while len(chosen) < 5:
            p = ((x - x[chosen].T) ** 2).min(1)
            chosen.append(rng.choice(8, p=p / p.sum()))
        return chosen

    draws = 500
    ours, theirs = np.zeros(8), np.zeros(8)
    for seed in range(draws):
        ours[clusters._seeds(x, rows, squares, 5, np.random.default_rng(seed), 128)] += 1
        theirs[plain(np.random.default_rng(10_000 + seed))] += 1
    np.testing.assert_allclose(ours / draws, theirs / draws, atol=4 * np.sqrt(0.5 / draws))


def test_an_empty_cluster_takes_the_farthest_point():
    x = np.array([[0.0], [1.0], [10.0], [11.0], [30.0]])
    assignment = np.array([0, 0, 1, 1, 1])
    centres = np.array([[0.5], [17.0], [-99.0]])
    filled = clusters._repair(x, centres, assignment, (x[:, 0] - centres[assignment, 0]) ** 2)
    assert filled.tolist() == [2] and assignment.tolist() == [0, 0, 1, 1, 2]


def test_kmeans_with_fewer_points_than_clusters_ends():
    x = np.repeat(np.random.default_rng(12).standard_normal((5, 3)), 20, axis=0)
    found = retrieval.kmeans(x, k=9, seed=0)
    assert len(np.unique(found.assignment)) == 5 and found.inertia == 0


BAD = np.ones((6, 2))
BAD[4, 1] = np.nan
X, Y = np.eye(6), np.array([0, 0, 1, 1, 2, 2])


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: _ranks(BAD, Y), r"embeddings\[4\] is not finite"),
        (lambda: _ranks(X * 1e25, Y), r"embeddings\[0\] is not finite.*scale"),
        (lambda: _ranks(X, Y, gallery=BAD, gallery_labels=Y), r"gallery\[4\] is not finite"),
        (lambda: _ranks(X[0], Y), r"shape \(6,\)"),
        (lambda: _ranks(X[:0], Y[:0]), r"shape \(0, 6\).*not empty"),
        (lambda: _ranks(X * 1j, Y), "complex128: give real"),
        (lambda: _ranks(X, Y[:5]), r"labels have shape \(5,\), but there are 6"),
        (lambda: _ranks(X, Y.astype(np.float32)), "labels are float32.*give integers"),
        (lambda: _ranks(X, Y, gallery=X), "give both, or neither"),
        (lambda: _ranks(X, Y, gallery_labels=Y), "give both, or neither"),
        (lambda: _ranks(X, Y, gallery=X[:, :3], gallery_labels=Y), "6 dimensions.*gallery has 3"),
        (
            lambda: _ranks(X, Y, gallery=X, gallery_labels=Y.astype(np.uint64)),
            "labels are int64 and uint64",
        ),
        (lambda: _ranks(X, Y, tile=100), "tile=100 must be a positive multiple of 128"),
        (lambda: retrieval.nearest(X, k=6), "k=6, but there are 5 items"),
        (lambda: retrieval.nearest(X, X, k=7), "k=7, but there are 6 items"),
        (lambda: retrieval.nearest(X, X, k=0), "k=0"),
        (lambda: retrieval.kmeans(X, k=7), "k=7 clusters, but there are 6 embeddings"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
