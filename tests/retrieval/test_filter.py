"""Ranks with a filter in bfloat16 are those of float32, bit for bit."""

import functools

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


def _counted(monkeypatch):
    """Counts the pairs that the filter has left open."""
    totals, original = [], filtering._screen

    def screen(*arguments):
        result = original(*arguments)
        totals.append(int(result[2].sum()))
        return result

    monkeypatch.setattr(filtering, "_screen", screen)
    return totals


@pytest.mark.parametrize(("similarity", "split"), [("euclidean", False), ("cosine", True)])
def test_close_comparisons_are_decided_in_float32(similarity, split, monkeypatch):
    x, y = _data()
    keywords = {"gallery": x[200:], "gallery_labels": y[200:]} if split else {}
    keywords |= {"similarity_fn": getattr(retrieval, similarity), "tile": 256}
    keywords |= {"devices": jax.devices()[:1]}
    queries = (x[:200], y[:200]) if split else (x, y)
    totals = _counted(monkeypatch)
    found = all_ranks(*queries, **keywords, filter_dtype=jnp.bfloat16)
    gallery, labels = (x[200:], y[200:]) if split else (x, y)
    # The filter decides nearly all, and leaves some.
    assert 0 < sum(totals) < len(queries[0]) * len(gallery) / 1000
    exact = all_similarities(queries[0], gallery, similarity)
    expected = naive_ranks(exact, queries[1], labels, within=not split)
    assert found == expected  # in float64: no two of these similarities are closer than float32


@pytest.mark.parametrize("devices", [1, 3])
def test_ties_stay_ties(devices, monkeypatch):
    """Whole numbers, whose products are exact: bitwise the ranks without a filter."""
    monkeypatch.setattr(filtering, "_PAIRS", 512)  # of many open pairs, a round takes 768
    x, y = lattice(RNG, 520, d=5, top=4), RNG.integers(0, 110, 520)
    groups = RNG.integers(-1, 40, 520)
    forms = ({}, {"groups": groups}, {"share": (1, 3)})
    for keywords in forms if devices == 1 else forms[1:]:
        options = keywords | {"tile": 256, "devices": jax.devices()[:devices]}
        plain = all_ranks(x, y, **options)
        assert all_ranks(x, y, **options, filter_dtype=jnp.bfloat16) == plain and plain
    # Bits below those of bfloat16 decide all comparisons.
    fine = (1 + np.arange(400) / 1024).astype(np.float32)[:, None]
    labels = np.arange(400) % 90
    plain = all_ranks(fine, labels, tile=256)
    assert all_ranks(fine, labels, tile=256, filter_dtype=jnp.bfloat16) == plain


def test_more_open_pairs_than_one_pass_takes(monkeypatch):
    """All vectors are equal: every pair is open, and every negative is ahead."""
    x, y = np.ones((600, 3), np.float32), np.arange(600) // 3
    totals = _counted(monkeypatch)
    found = all_ranks(x, y, tile=256, filter_dtype=jnp.bfloat16)
    assert max(totals) > 2 * filtering._PAIRS
    assert all(ranks == [598, 599] for ranks in found.values()) and len(found) == 600


def test_a_single_pair():
    gallery = {"gallery": np.array([[1.0], [2.0], [3.0]]), "gallery_labels": np.array([1, 0, 1])}
    query = np.zeros((1, 1)), np.zeros(1, int)
    assert all_ranks(*query, **gallery, filter_dtype=jnp.bfloat16) == {0: [2]}


@functools.cache
def _ranked():
    """Thirteen tiles of data, and the ranks of a naive loop, which takes long."""
    x, y = _data(1600, rng=np.random.default_rng(1))
    return x, y, naive_ranks(all_similarities(x, x, "euclidean"), y, y, within=True)


@pytest.mark.parametrize("devices", [1, 8])
def test_one_program_compares_with_several_tiles(devices, monkeypatch):
    x, y, expected = _ranked()
    totals = _counted(monkeypatch) if devices == 1 else []
    options = {"tile": 128, "devices": jax.devices()[:devices]}
    found = all_ranks(x, y, **options, filter_dtype=jnp.bfloat16)
    assert found == expected
    assert devices > 1 or len(totals) == 13 * 2  # 7 and 6 of 13 tiles, for each of 13 blocks


def test_a_program_compares_with_fewer_tiles_if_they_are_large(monkeypatch):
    """So that the pairs that it leaves open take no more memory."""
    x, y, expected = _ranked()
    totals = _counted(monkeypatch)
    monkeypatch.setattr(filtering, "_SIMILARITIES", 3 * 128**2)
    options = {"tile": 128, "devices": jax.devices()[:1]}
    assert all_ranks(x, y, **options, filter_dtype=jnp.bfloat16) == expected
    assert len(totals) == 13 * 5  # four times three of 13 tiles, and one


@pytest.mark.parametrize("d", [1, 40])  # errors of one product do not cancel
@pytest.mark.parametrize("scale", [1e-18, 1.0, 1e15])
def test_bounds_hold(scale, d):
    x = (scale * RNG.normal(size=(256, d))).astype(np.float32)
    x[:20] *= 1e-3
    x[20:30] = scale * (1 + 2**-8 - 2**-17 - 2**-23)  # nearly the largest errors, of one sign
    rows = tiles.plain_tiles(x, 256)[0]
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
    totals = _counted(monkeypatch)
    expected = all_ranks(x, y)
    assert not totals  # a CPU
    monkeypatch.setattr(tiles, "on_accelerator", lambda devices: True)
    assert all_ranks(x, y) == expected and totals
    assert tiles.choose_tile(None, None) == 4096 and tiles.choose_tile(256, None) == 256
    with jax.enable_x64(True), pytest.raises(ValueError, match="for embeddings of float32"):
        all_ranks(x.astype(np.float64), y, filter_dtype=jnp.bfloat16)
