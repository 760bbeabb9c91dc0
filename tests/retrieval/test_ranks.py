"""Ranks against loops over all pairs in double precision."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_loops import all_ranks, all_similarities, lattice, naive_ranks

from dmljax import retrieval
from dmljax.retrieval import ranking, tiles


@pytest.mark.parametrize("n, classes", [(2, 1), (40, 5), (128, 60), (300, 2), (700, 70)])
@pytest.mark.parametrize("queries", [None, 30, 260])
def test_ranks_are_those_of_the_loop(n, classes, queries):
    rng = np.random.default_rng(n)
    g, z = lattice(rng, n), rng.integers(0, classes, n)
    x, y, gallery = g, z, {}
    if queries is not None:
        x, y = lattice(rng, queries), rng.integers(0, classes + 1, queries)
        gallery = {"gallery": g, "gallery_labels": z}
    expected = naive_ranks(all_similarities(x, g), y, z, within=queries is None)
    assert all_ranks(x, y, **gallery, tile=128) == expected


@settings(deadline=None, max_examples=15)
@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 4), st.integers(0, 9), st.booleans())
def test_ranks_with_ties_are_those_of_the_loop(n, classes, top, seed, split):
    rng = np.random.default_rng(seed)
    x, y = lattice(rng, n, top=top), rng.integers(0, classes, n)
    g, z = (lattice(rng, 50, top=top), rng.integers(0, classes, 50)) if split else (None, None)
    expected = naive_ranks(
        all_similarities(x, x if g is None else g), y, y if z is None else z, within=not split
    )
    assert all_ranks(x, y, gallery=g, gallery_labels=z) == expected


@pytest.mark.parametrize("symmetric", [True, False])
def test_mirrored_products_change_nothing(monkeypatch, symmetric):
    rng = np.random.default_rng(4)
    x, y = rng.standard_normal((600, 17), dtype=np.float32), rng.integers(0, 150, 600)
    monkeypatch.setattr(ranking, "is_symmetric", lambda tile: symmetric)
    assert all_ranks(x, y, tile=128) == naive_ranks(all_similarities(x, x), y, y, within=True)


def test_a_backend_whose_products_are_not_symmetric_is_noticed(monkeypatch):
    rows, original = tiles.Tiles(np.ones((128, 3), np.float32), side=128)[0], tiles.similarities
    assert ranking.is_symmetric(rows)

    def similarities(x, y):
        return original(x, y).at[3, 5].add(1e-6)

    monkeypatch.setattr(tiles, "similarities", similarities)
    assert not ranking.is_symmetric(rows)


@pytest.mark.parametrize("d", [1, 64, 129])
@pytest.mark.parametrize("name", ["euclidean", "cosine"])
def test_duplicates_are_tied_whatever_tile_they_are_in(d, name):
    # Rounding must be the same in every tile: seven points are copied to many rows.
    rng = np.random.default_rng(d)
    which, y = rng.integers(0, 7, 400), rng.integers(0, 30, 400)
    points = rng.standard_normal((7, d), dtype=np.float32)
    exact = all_similarities(points, points, name)
    if d == 1 and name == "cosine":
        exact = np.sign(points) @ np.sign(points).T
    expected = naive_ranks(exact[which][:, which], y, y, within=True)
    assert all_ranks(points[which], y, similarity_fn=getattr(retrieval, name), tile=128) == expected


def test_euclidean_is_not_cosine_and_survives_an_offset():
    rng = np.random.default_rng(5)
    x = rng.standard_normal((200, 8)) * rng.uniform(0.1, 5, (200, 1))
    y = rng.integers(0, 40, 200)
    euclidean = naive_ranks(all_similarities(x, x), y, y, within=True)
    cosine = naive_ranks(all_similarities(x, x, "cosine"), y, y, within=True)
    assert euclidean != cosine
    assert all_ranks(x, y) == euclidean
    assert all_ranks(x, y, similarity_fn=retrieval.cosine) == cosine
    far = (np.round(x * 64) / 64 + 4096).astype(np.float32)  # exact in float32, its square is not
    assert all_ranks(far, y) == naive_ranks(all_similarities(far, far), y, y, within=True)
    (q, g), (y, z) = np.split(far, 2), np.split(y, 2)
    expected = naive_ranks(all_similarities(q, g), y, z, within=False)
    assert all_ranks(q, y, gallery=g, gallery_labels=z) == expected


def test_labels_are_compared_as_integers():
    x = np.array([[0.0], [1.0], [1.1], [5.0]])
    for base in (2**24, 2**53, -(2**62)):
        y = np.array([base, base + 1, base, base + 1])
        assert all_ranks(x, y) == {0: [2], 1: [3], 2: [2], 3: [2]}


def test_every_type_of_array_gives_the_same_ranks(tmp_path):
    rng = np.random.default_rng(6)
    x, y = lattice(rng, 150), rng.integers(0, 30, 150)
    expected = naive_ranks(all_similarities(x, x), y, y, within=True)
    np.save(tmp_path / "x.npy", x)
    kinds = [np.load(tmp_path / "x.npy", mmap_mode="r"), jnp.asarray(x), np.asfortranarray(x)]
    kinds += [x.astype(t) for t in (np.float64, np.float16, ml_dtypes.bfloat16, np.uint8, np.int64)]
    for kind in kinds:
        assert all_ranks(kind, y) == expected
        assert all_ranks(kind, jnp.asarray(y)) == expected


def test_double_precision_stays_double():
    x = np.array([[0.0], [1.0], [1.0 + 1e-12]])
    y = np.array([0, 0, 1])
    assert all_ranks(x, y)[0] == [2]  # in single precision the negative is tied
    with jax.enable_x64(True):
        for scale in (1, 0.1, 0.3, 0.7):
            assert all_ranks(scale * x, y)[0] == [1]
        assert retrieval.nearest(x, k=1)[1].dtype == np.float64


def test_no_array_has_the_size_of_queries_by_gallery(monkeypatch):
    shapes = set()

    def watched(original, rows, columns):
        out = original(rows, columns)
        shapes.add(out.shape)
        return out

    for module, name in ((tiles, "similarities"), (tiles, "negatives")):
        watching = functools.partial(watched, getattr(module, name))
        monkeypatch.setattr(module, name, watching)
    rng = np.random.default_rng(7)
    all_ranks(rng.standard_normal((900, 4)), rng.integers(0, 200, 900), tile=128)
    assert shapes == {(128, 128)}


@pytest.mark.parametrize(
    ("protocol", "devices", "sorted_from"),
    [("within", 1, 9), ("within", 3, 10**6), ("gallery", 3, 1), ("groups", 1, 10**6)],
)
def test_shares_of_the_queries_are_together_all_of_them(
    monkeypatch, protocol, devices, sorted_from
):
    rng = np.random.default_rng(4)
    x, y = lattice(rng, 400, d=4), rng.integers(0, 25, 400)
    monkeypatch.setattr(ranking, "_SORTED_FROM", sorted_from)
    monkeypatch.setattr(tiles, "STRIP_SIZE", 20_000)
    options = {"tile": 128, "devices": jax.devices()[:devices]}
    if protocol == "gallery":
        options |= {"gallery": x[::-1][:350], "gallery_labels": y[::-1][:350]}
    elif protocol == "groups":
        options["groups"] = rng.integers(-1, 9, 400)
    expected = all_ranks(x, y, **options)
    together = [all_ranks(x, y, **options, share=(i, 3)) for i in range(3)]
    assert sum(map(len, together)) == len(expected)
    assert max(map(len, together)) < 400 / 3 + 130
    assert {query: row for part in together for query, row in part.items()} == expected
    with pytest.raises(ValueError, match=r"share=\(2, 2\) must be"):
        all_ranks(x, y, **options, share=(2, 2))
