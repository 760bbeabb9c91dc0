"""Ranks with a filter in bfloat16 are those of float32, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from search_loops import all_ranks, all_similarities, lattice, naive_ranks

from dmljax import retrieval
from dmljax.retrieval import filtering, ranking, tiles

RNG = np.random.default_rng(0)


def _data(n=900, d=24, spread=0.6, rng=RNG):
    """Unit vectors around centers of classes of 1 to 12, of which many compare closely."""
    labels = rng.integers(0, n // 6, n)
    x = rng.normal(size=(n // 6, d))[labels] + spread * rng.normal(size=(n, d))
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32), labels


@pytest.mark.parametrize(("similarity", "split"), [("euclidean", False), ("cosine", True)])
def test_close_comparisons_are_decided_in_float32(similarity, split):
    x, y = _data(500)
    (queries, labels), (gallery, gallery_labels) = (x, y), (x, y)
    keywords = {"similarity_fn": getattr(retrieval, similarity), "tile": 256}
    if split:
        (queries, gallery), (labels, gallery_labels) = np.split(x, [100]), np.split(y, [100])
        keywords |= {"gallery": gallery, "gallery_labels": gallery_labels}
    keywords |= {"devices": jax.devices()[:1], "filter_dtype": jnp.bfloat16}
    exact = all_similarities(queries, gallery, similarity)
    expected = naive_ranks(exact, labels, gallery_labels, within=not split)
    # In float64: no two of these similarities are closer than float32.
    assert all_ranks(queries, labels, **keywords) == expected


def test_the_filter_decides_nearly_all_comparisons():
    x, _ = _data(256)
    tile = tiles.Tiles(x, groups=np.arange(256)[:, None], side=256)[0]
    exact = all_similarities(x, x)
    thresholds = np.sort(exact, axis=1)[:, [250, 240, 100]].astype(np.float32)
    ahead, is_open = filtering._screen(jnp.asarray(thresholds), tile, tile)
    assert 0 < is_open.sum() < 0.03 * is_open.size
    assert (is_open.sum(axis=1) > 0).mean() > 0.9  # the item that is the threshold
    exact[np.eye(256, dtype=bool) | np.asarray(is_open)] = -np.inf  # an item is its own group
    expected = [(exact >= t[:, None]).sum(axis=1) for t in thresholds.T]
    np.testing.assert_array_equal(ahead.T, expected)


@pytest.mark.parametrize("devices", [1, 3])
def test_ties_stay_ties(devices):
    """Whole numbers, whose products are exact: bitwise the ranks without a filter."""
    x, y = lattice(RNG, 400, d=5, top=4), RNG.integers(0, 85, 400)
    forms = {1: ({}, {"groups": RNG.integers(-1, 40, 400)}), 3: ({"share": (1, 2)},)}
    for keywords in forms[devices]:
        options = keywords | {"tile": 128, "devices": jax.devices()[:devices]}
        plain = all_ranks(x, y, **options)
        assert all_ranks(x, y, **options, filter_dtype=jnp.bfloat16) == plain and plain
    # Bits below those of bfloat16 decide all comparisons.
    fine = (1 + np.arange(400) / 1024).astype(np.float32)[:, None]
    options = {"tile": 128, "devices": jax.devices()[:devices]}
    plain = all_ranks(fine, np.arange(400) % 90, **options)
    assert all_ranks(fine, np.arange(400) % 90, **options, filter_dtype=jnp.bfloat16) == plain


def test_more_open_pairs_than_one_round_takes():
    """All vectors are equal: every pair is open, and every negative is ahead."""
    x, y = np.ones((240, 3), np.float32), np.arange(240) // 3
    assert 4 * filtering._PAIRS < 240**2
    ranks = all_ranks(x, y, tile=256, filter_dtype=jnp.bfloat16)
    assert list(ranks.values()) == [[238, 239]] * 240


def test_a_single_pair():
    gallery = {"gallery": np.array([[1.0], [2.0], [3.0]]), "gallery_labels": np.array([1, 0, 1])}
    query = np.zeros((1, 1)), np.zeros(1, int)
    assert all_ranks(*query, **gallery, filter_dtype=jnp.bfloat16) == {0: [2]}


@pytest.mark.parametrize("d", [1, 40])  # errors of one product do not cancel
@pytest.mark.parametrize("scale", [1e-18, 1.0, 1e15])
def test_bounds_hold(scale, d):
    x = (scale * RNG.normal(size=(256, d))).astype(np.float32)
    x[:20] *= 1e-3
    x[20:30] = scale * (1 + 2**-8 - 2**-17 - 2**-23)  # nearly the largest errors, of one sign
    rows = tiles.Tiles(x, side=256)[0]
    exact = all_similarities(x, x)
    results = filtering._approximate(filtering._terms(rows.vectors)[0], rows, rows)
    similarities, radius = (np.asarray(x, np.float64) for x in results)
    assert (abs(similarities - exact) <= radius).all()
    assert (2 * radius).mean() < 5e-4 * d * scale**2 + 4e-37  # and are narrow


def test_no_compiler_may_leave_out_the_rounding():
    """XLA drops a conversion to bfloat16 and back on GPUs: then `high` was x, and `low` was 0."""
    x = jnp.ones((2, 3), jnp.float32)
    jaxpr = jax.make_jaxpr(filtering._terms)(x)
    conversions = [e for e in jaxpr.eqns if e.primitive.name == "convert_element_type"]
    assert {(e.invars[0].aval.dtype.name, e.params["new_dtype"].name) for e in conversions} == {
        ("float32", "bfloat16")
    }


def test_a_device_that_is_less_precise_has_no_filter(monkeypatch):
    """As a GPU was where XLA had left out the conversion to bfloat16 and back."""
    vectors, original = np.ones((3, 2), np.float32), filtering._terms
    monkeypatch.setattr(tiles, "on_accelerator", lambda devices: True)
    filtering.keeps_radius.cache_clear()
    assert ranking._is_filtered("auto", vectors, vectors, None)

    def without_low(x):
        rows, columns = original(x)
        d = x.shape[1]
        return rows.at[:, 2 * d :].set(0), columns.at[:, d : 2 * d].set(0)

    monkeypatch.setattr(filtering, "_terms", without_low)
    filtering.keeps_radius.cache_clear()
    assert not ranking._is_filtered("auto", vectors, vectors, None)
    filtering.keeps_radius.cache_clear()


def test_accelerators_use_the_filter_and_larger_tiles(monkeypatch, unchecked):
    x, y = _data(300)
    calls, original = [], filtering.count_rows
    watched = lambda *arrays: calls.append(None) or original(*arrays)  # noqa: E731
    monkeypatch.setattr(filtering, "count_rows", watched)
    options = {"devices": jax.devices()[:1]}
    expected = all_ranks(x, y, **options)
    assert not calls  # a CPU
    monkeypatch.setattr(tiles, "on_accelerator", lambda devices: True)
    assert all_ranks(x, y, **options) == expected and calls
    assert tiles.choose_tile(None, None) == 4096 and tiles.choose_tile(256, None) == 256
    with jax.enable_x64(True), pytest.raises(ValueError, match="for embeddings of float32"):
        all_ranks(x.astype(np.float64), y, filter_dtype=jnp.bfloat16)
