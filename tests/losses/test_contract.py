"""Properties of every loss. A public loss without a row in `TABLE` fails the first test.

To add a loss: write one function in a file of `dmljax/losses/`, add its name to that file's
`__all__`, and add one row to `TABLE`. `ENTRIES` of `docs/make_gallery.py` adds a formula.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dmljax import losses

B, D, C, SUB = 12, 6, 5, 3


# name -> (kind, keywords). Kinds: "pair" f(x, labels), "proxy" f(x, labels, proxies), "subproxy"
# the same with sub-centers, "logits" f(logits, labels), "views" f(x, other).
TABLE = {
    "angular": ("pair", {}),
    "arcface": ("proxy", {}),
    "circle": ("pair", {}),
    "clip": ("views", {}),
    "contrastive": ("pair", {}),
    "cosface": ("proxy", {}),
    "fast_ap": ("pair", {}),
    "generalized_lifted_structure": ("pair", {}),
    "histogram": ("pair", {}),
    "intra_pair_variance": ("pair", {}),
    "label_smoothed_cross_entropy": ("logits", {}),
    "large_margin_softmax": ("proxy", {}),
    "lifted_structure": ("pair", {}),
    "margin": ("pair", {}),
    "multi_similarity": ("pair", {}),
    "n_pairs": ("pair", {}),
    "nca": ("pair", {}),
    "normalized_softmax": ("proxy", {}),
    "ntxent": ("pair", {}),
    "pnp": ("pair", {}),
    "proxy_anchor": ("proxy", {}),
    "proxy_nca": ("proxy", {}),
    "proxy_nca_pp": ("proxy", {}),
    "ranked_list": ("pair", {"margin": 0.4, "negative_temperature": 3.0}),
    "recall_at_k": ("pair", {}),
    "semihard_triplet": ("pair", {}),
    "siglip": ("views", {}),
    "smooth_ap": ("pair", {}),
    "smooth_triplet": ("pair", {}),
    "snr_contrastive": ("pair", {}),
    "soft_triple": ("subproxy", {}),
    "sphereface": ("proxy", {}),
    "subcenter_arcface": ("subproxy", {}),
    "supcon": ("pair", {}),
    "threshold_consistent_margin": ("pair", {}),
    "swap_triplet": ("pair", {}),
    "triplet": ("pair", {}),
    "tuplet_margin": ("pair", {}),
    "vicreg": ("views", {}),
}


# Public names that are not losses of a batch. They have tests of their own.
NOT_OF_A_BATCH = {
    "center_invariant",
    "cross_batch_memory",
    "lp",
    "prefixes",
    "regular_face",
    "sparse_centers",
    "stats",
    "tiled",
    "weighted_sum",
    "zero_mean",
}


PAIRS = [name for name, (kind, _) in TABLE.items() if kind == "pair"]


# Losses that do not normalize embeddings.
UNNORMALIZED = {"semihard_triplet", "vicreg", "label_smoothed_cross_entropy", "sphereface"}


UNNORMALIZED |= {"large_margin_softmax"}


every_loss = pytest.mark.parametrize("name", TABLE)


def test_every_public_name_is_enrolled():
    assert set(losses.__all__) == set(TABLE) | NOT_OF_A_BATCH


def call(name, x, labels, extra, **keywords):
    kind, defaults = TABLE[name]
    function = functools.partial(getattr(losses, name), **defaults, **keywords)
    if kind == "pair":
        return function(x, labels)
    if kind == "logits":
        return function(x @ extra["weights"].astype(x.dtype), labels)
    if kind == "views":
        return function(x, extra["other"].astype(x.dtype))
    return function(x, labels, extra["proxies" if kind == "proxy" else "subproxies"])


def inputs(seed=0, b=B):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(b, D)).astype(np.float32)
    extra = {
        "proxies": rng.normal(size=(C, D)),
        "subproxies": rng.normal(size=(C, SUB, D)),
        "other": x + rng.normal(size=(b, D)),
        "weights": rng.normal(size=(D, C)),
    }
    labels = np.repeat(np.arange(4), b // 4)
    return x, labels, jax.tree.map(lambda a: a.astype(np.float32), extra)


@functools.cache
def compiled(name):
    """The compiled value and gradient of a loss, which most of its tests share."""
    return jax.jit(
        jax.value_and_grad(
            lambda x, labels, extra, where: call(name, x, labels, extra, where=where)
        )
    )


def run(name, x, labels, extra, where=None):
    where = np.ones(len(x), bool) if where is None else where
    value, gradient = compiled(name)(x, labels, extra, where)
    return np.asarray(value), np.asarray(gradient)


def close(actual, expected, rtol=2e-4):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert np.linalg.norm(actual - expected) <= rtol * np.linalg.norm(expected) + 1e-6


@every_loss
def test_a_loss_is_a_finite_scalar_with_a_gradient(name):
    value, gradient = run(name, *inputs())
    assert value.shape == () and value.dtype == np.float32
    assert np.isfinite(value) and np.abs(gradient).max() > 1e-6


@every_loss
def test_masking_a_row_equals_dropping_it(name):
    x, labels, extra = inputs()
    where = np.ones(B, bool)
    where[[1, 6, 7, 11]] = False
    x_with_nan = np.where(where[:, None], x, np.nan)
    extra_with_nan = extra | {"other": np.where(where[:, None], extra["other"], np.nan)}
    masked = run(name, x_with_nan, labels, extra_with_nan, where)
    dropped = run(name, x[where], labels[where], extra | {"other": extra["other"][where]})
    close(masked[0], dropped[0])
    close(masked[1][where], dropped[1])
    assert not masked[1][~where].any()


@every_loss
def test_the_order_of_rows_does_not_matter(name):
    x, labels, extra = inputs()
    order = np.random.default_rng(1).permutation(B)
    if name == "n_pairs":  # takes the first pair of every label: keep the order within labels
        order = np.array([9, 3, 0, 4, 6, 1, 10, 7, 2, 5, 8, 11])
    value, gradient = run(name, x, labels, extra)
    permuted = run(name, x[order], labels[order], extra | {"other": extra["other"][order]})
    close(permuted[0], value)
    close(permuted[1], gradient[order])


def _degenerate():
    x, labels, _ = inputs()
    duplicates = np.concatenate([x[:6], x[:6]])
    return {
        "duplicates": (duplicates, np.concatenate([labels[:6], labels[:6]])),
        "duplicates of another class": (duplicates, labels),
        "one point": (np.repeat(x[:1], B, axis=0), labels),
        "zeros": (np.zeros_like(x), labels),
        "a zero row": (np.where(np.arange(B)[:, None] == 3, 0, x), labels),
        "opposites": (np.concatenate([x[:6], -x[:6]]), labels),
        "one class": (x, np.zeros(B, int)),
        "all singletons": (x, np.arange(B)),
        "tiny": (1e-30 * x, labels),
        "huge": (1e15 * x, labels),
    }


@pytest.mark.parametrize("batch", _degenerate())
@every_loss
def test_a_degenerate_batch_has_a_finite_loss_and_gradient(name, batch):
    x, labels = _degenerate()[batch]
    kind = TABLE[name][0]
    _, _, extra = inputs()
    if kind in ("proxy", "subproxy", "logits"):
        labels = labels % C
        extra["proxies"][0] = x[0]  # parallel to a row
    if batch == "huge" and name in UNNORMALIZED:
        x = x * 1e-10  # squares must fit into float32
    extra["other"] = x
    value, gradient = run(name, x, labels, extra)
    assert np.isfinite(value) and np.isfinite(gradient).all()


@every_loss
def test_an_empty_mask_gives_0(name):
    x, labels, extra = inputs()
    value, gradient = run(name, x, labels, extra, np.zeros(B, bool))
    assert value == 0 and not gradient.any()


@every_loss
@pytest.mark.parametrize("b", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_batch_of_one_or_two_rows_has_a_finite_loss(name, b):
    x, labels, extra = inputs()
    value, gradient = run(name, x[:b], labels[:b], extra | {"other": extra["other"][:b]})
    assert np.isfinite(value) and np.isfinite(gradient).all()


@every_loss
def test_a_nan_in_a_row_makes_the_loss_nan(name):
    x, labels, extra = inputs()
    x[4, 2] = np.nan
    assert np.isnan(run(name, x, labels, extra)[0])


@every_loss
def test_bfloat16_is_computed_in_float32(name):
    x, labels, extra = inputs()
    half = jnp.asarray(x, jnp.bfloat16)
    value, gradient = compiled(name)(half, labels, extra, np.ones(B, bool))
    assert value.dtype == jnp.float32 and gradient.dtype == jnp.bfloat16
    if TABLE[name][0] == "logits":
        return  # the product with the weights, not the loss, is in half precision
    views = jax.tree.map(lambda a: np.asarray(jnp.asarray(a, jnp.bfloat16), np.float32), extra)
    if TABLE[name][0] != "views":
        views = extra
    wide = run(name, np.asarray(half, np.float32), labels, views)
    close(value, wide[0], 1e-3)
    close(np.asarray(gradient, np.float32), wide[1], 1e-2)


@every_loss
def test_float64_stays_float64(name):
    x, labels, extra = inputs()
    with jax.enable_x64(True):
        shape = jax.eval_shape(lambda x: call(name, x, labels, extra), x.astype(np.float64))
    assert shape.dtype == jnp.float64


@every_loss
def test_jit_equals_no_jit(name):
    x, labels, extra = inputs()
    close(call(name, x, labels, extra), run(name, x, labels, extra)[0])


@every_loss
def test_vmap_equals_a_loop(name):
    batches = [inputs(seed) for seed in range(3)]
    labels, extra = batches[0][1], batches[0][2]
    xs = np.stack([x for x, _, _ in batches])
    values = jax.jit(jax.vmap(lambda x: call(name, x, labels, extra)))(xs)
    for x, value in zip(xs, values, strict=True):
        close(value, run(name, x, labels, extra)[0])


@every_loss
def test_a_second_batch_does_not_recompile(name):
    run(name, *inputs())
    size = compiled(name)._cache_size()
    x, labels, extra = inputs(7)
    run(name, x, labels[::-1].copy(), extra, np.arange(B) != 3)
    assert compiled(name)._cache_size() == size


@every_loss
def test_no_loss_stores_an_array_of_b_cubed(name):
    """256 MiB for b = 1,024 and d = 128, with the gradient, are about 60 arrays of b^2."""
    x, labels, extra = (jax.ShapeDtypeStruct((1024, 128), np.float32), None, None)
    labels = jax.ShapeDtypeStruct((1024,), np.int32)
    shapes = {"proxies": (256, 128), "subproxies": (256, SUB, 128), "other": (1024, 128)}
    shapes["weights"] = (128, 256)
    extra = {k: jax.ShapeDtypeStruct(v, np.float32) for k, v in shapes.items()}
    function = jax.jit(jax.value_and_grad(lambda x, y, e: call(name, x, y, e)))
    memory = function.lower(x, labels, extra).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 256 * 2**20


@every_loss
def test_only_unnormalized_losses_depend_on_the_lengths_of_rows(name):
    x, labels, extra = inputs()
    lengths = np.linspace(0.5, 2, B, dtype=np.float32)[:, None]
    value = run(name, x, labels, extra)[0]
    scaled = run(name, x * lengths, labels, extra)[0]
    if name in UNNORMALIZED:
        assert abs(scaled - value) > 1e-3
    else:
        close(scaled, value)


@every_loss
def test_an_unknown_keyword_raises(name):
    x, labels, extra = inputs()
    with pytest.raises(TypeError, match="tempratur"):
        call(name, x, labels, extra, tempratur=1)
