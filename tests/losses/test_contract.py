"""Properties of every loss in `losses.__all__`. A new loss is tested as soon as it is there.

To add a loss: write one function in a file of `dmljax/losses/`, and add its name to that file's
`__all__` and a naive reference to `naive.py`. `ENTRIES` of `docs/make_gallery.py` adds a formula.
"""

import functools
import inspect
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dmljax import losses
from dmljax.losses import pnp_penalties
from dmljax.train import compilation

B, D, C, SUB = 12, 6, 5, 3
UNEQUAL = np.array([0, 0, 0, 1, 4, 1, 2, 2, 2, 3, 3, 3])  # row 4 is only a negative


# Keywords without a default.
KEYWORDS = {"ranked_list": {"margin": 0.4, "negative_temperature": 3.0}}
# Further formulas of a loss. High temperatures let all terms matter.
VARIANTS = {
    **{
        f"pnp:{name}": {"temperature": 0.2, "penalty_fn": getattr(pnp_penalties, name)}
        for name in pnp_penalties.__all__
    },
    "recall_at_k:warm": {"ks": (1, 3, 4), "k_temperature": 0.2},
    "smooth_ap:warm": {"temperature": 0.2},
}


def kind_of(name):
    """ "pair" f(x, labels), "proxy" f(x, labels, proxies), "subproxy" the same with sub-centers,
    "logits" f(logits, labels), "views" f(x, other), "vectors" f(x)."""
    parameters = inspect.signature(function_of(name)).parameters
    if "labels" not in parameters:
        return "views" if "other" in parameters else "vectors"
    if "proxies" in parameters:
        return "subproxy" if "c k d" in str(parameters["proxies"].annotation) else "proxy"
    return "logits" if "logits" in parameters else "pair"


def function_of(name):
    return getattr(losses, name.partition(":")[0])


# Public names that are not losses of a batch. They have tests of their own.
NOT_OF_A_BATCH = {*losses.memory.__all__, *losses.combinators.__all__, "sparse_centers"}
_NAMES = [*sorted({*losses.__all__} - NOT_OF_A_BATCH), *VARIANTS]
TABLE = {n: (kind_of(n), KEYWORDS.get(n, {}) | VARIANTS.get(n, {})) for n in _NAMES}
# A variant changes the formula, and nothing of what its function does for every formula.
FUNCTIONS = [pytest.param(n, marks=[pytest.mark.slow] * (":" in n)) for n in TABLE]
PAIRS = [case for case in FUNCTIONS if TABLE[case.values[0]][0] == "pair"]


# Losses that do not normalize embeddings, and those of them that square them.
SQUARED = {"semihard_triplet", "vicreg", "label_smoothed_cross_entropy", "center_invariant", "lp"}
UNNORMALIZED = {*SQUARED, "sphereface", "large_margin_softmax", "zero_mean"}


# The second array of vectors, which gets a gradient as the embeddings do.
SECOND = {"proxy": "proxies", "subproxy": "subproxies", "views": "other"}


every_loss = pytest.mark.parametrize("name", TABLE)
every_function = pytest.mark.parametrize("name", FUNCTIONS)


def call(name, x, labels, extra, **keywords):
    kind, defaults = TABLE[name]
    function = functools.partial(function_of(name), **defaults, **keywords)
    if kind == "vectors":
        return function(x)
    if kind == "views":
        return function(x, extra["other"])
    return function(x, labels, *([extra[SECOND[kind]]] if kind in SECOND else []))


def inputs(seed=0, b=B):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(b, D)).astype(np.float32)
    extra = {
        "proxies": rng.normal(size=(C, D)),
        "subproxies": rng.normal(size=(C, SUB, D)),
        "other": x + rng.normal(size=(b, D)),
    }
    labels = np.repeat(np.arange(4), b // 4)
    return x, labels, jax.tree.map(lambda a: a.astype(np.float32), extra)


@functools.cache
def compiled(name):
    """The compiled value and gradients of a loss, which most of its tests share."""
    return jax.jit(
        jax.value_and_grad(
            lambda x, second, labels, where: call(
                name, x, labels, {SECOND.get(TABLE[name][0]): second}, where=where
            ),
            argnums=(0, 1),
        )
    )


class Result(NamedTuple):
    value: np.ndarray
    gradient: np.ndarray  # of the embeddings
    second: np.ndarray  # the gradient of the proxies or of the other view, or []

    @property
    def is_finite(self):
        return all(np.isfinite(array).all() for array in self)

    @property
    def is_zero(self):
        return not any(array.any() for array in self)


def run(name, x, labels, extra, where=None):
    where = np.ones(len(x), bool) if where is None else where
    value, gradients = compiled(name)(x, second_of(name, extra), labels, where)
    return Result(*map(np.asarray, (value, *gradients)))


def second_of(name, extra):
    return extra[SECOND[TABLE[name][0]]] if TABLE[name][0] in SECOND else np.zeros(0, np.float32)


def close(actual, expected, rtol=1e-5):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert np.linalg.norm(actual - expected) <= rtol * np.linalg.norm(expected) + 1e-6


@every_loss
def test_a_loss_is_a_finite_scalar_with_a_gradient(name):
    result = run(name, *inputs())
    assert result.value.shape == () and result.value.dtype == np.float32 and result.is_finite
    assert np.abs(result.gradient).max() > 1e-6
    assert TABLE[name][0] not in SECOND or np.abs(result.second).max() > 1e-6


@every_loss
def test_masking_a_row_equals_dropping_it(name):
    x, labels, extra = inputs()
    where = np.ones(B, bool)
    where[[4, 5, 6, 9, 10]] = False  # two rows are then alone in their classes
    plain = run(name, x, labels, extra, where)
    x_with_nan = np.where(where[:, None], x, np.nan)
    extra_with_nan = extra | {"other": np.where(where[:, None], extra["other"], np.nan)}
    other_labels = np.where(where, labels, -7 + 99 * (np.arange(B) % 2))  # no classes
    masked = run(name, x_with_nan, other_labels, extra_with_nan, where)
    jax.tree.map(np.testing.assert_array_equal, masked, plain)
    dropped = run(name, x[where], labels[where], extra | {"other": extra["other"][where]})
    close(masked.value, dropped.value)
    close(masked.gradient[where], dropped.gradient)
    assert not masked.gradient[~where].any()
    by_rows = TABLE[name][0] == "views"
    close(masked.second[where] if by_rows else masked.second, dropped.second)
    assert not by_rows or not masked.second[~where].any()


@every_loss
def test_the_order_of_rows_does_not_matter(name):
    x, labels, extra = inputs()
    order = np.random.default_rng(1).permutation(B)
    if name == "n_pairs":  # takes the first pair of every label: keep the order within labels
        order = np.array([9, 3, 0, 4, 6, 1, 10, 7, 2, 5, 8, 11])
    for classes in (labels, UNEQUAL):
        result = run(name, x, classes, extra)
        permuted = run(name, x[order], classes[order], extra | {"other": extra["other"][order]})
        close(permuted.value, result.value)
        close(permuted.gradient, result.gradient[order])
        by_rows = TABLE[name][0] == "views"
        close(permuted.second, result.second[order] if by_rows else result.second)


def _degenerate():
    x = inputs()[0]
    duplicates = np.concatenate([x[:6], x[:6]])
    return {
        "ordinary": x,
        "duplicates": duplicates,
        "near duplicates": duplicates + 1e-6 * inputs(1)[0],
        "one point": np.repeat(x[:1], B, axis=0),
        "nearly one point": 1 + 1e-6 * x,
        "zeros": np.zeros_like(x),
        "a zero row": np.where(np.arange(B)[:, None] == 3, 0, x),
        "zeros in every second row": np.where(np.arange(B)[:, None] % 2, 0, x),
        "opposites": np.concatenate([x[:6], -x[:6]]),
        "tiny": np.float32(1e-30) * x,
        "huge": np.float32(1e30) * x,
    }


CLASSES = {
    "four": np.repeat(np.arange(4), B // 4),
    "of duplicates": np.tile(np.arange(6) // 3, 2),
    "one": np.zeros(B, int),
    "singletons": np.arange(B),
}


@pytest.mark.parametrize("batch", _degenerate())
@every_loss
def test_a_degenerate_batch_has_a_finite_loss_and_gradient(name, batch):
    x, (_, _, extra) = _degenerate()[batch], inputs()
    if batch == "huge" and name in SQUARED:
        x = x * np.float32(1e-25)  # squares must fit into float32
    if TABLE[name][0] != "pair":
        extra["other"] = x
        for proxies in (extra["proxies"], extra["subproxies"].swapaxes(0, 1)[0]):
            proxies[0] = inputs()[0][0]  # parallel to a row
            proxies[1] = -2 * inputs()[0][4]  # and opposite
            proxies[3] = 0
    for labels in CLASSES.values():
        labels = labels if TABLE[name][0] == "pair" else labels % C
        for counting in (B, 2, 1, 0):
            result = run(name, x, labels, extra, np.arange(B) < counting)
            assert result.is_finite
            assert counting or result.is_zero
            if TABLE[name][0] == "pair":
                assert result.value >= -1e-5 and (counting > 1 or result.is_zero)


@every_loss
def test_a_nan_in_any_row_makes_the_loss_nan(name):
    x, labels, extra = inputs()
    for classes, partner in ((labels, 4), (UNEQUAL, 5)):
        rows = range(B)
        if name == "n_pairs":  # takes the first pair of every label
            rows = [0, 1, 3, partner, 6, 7, 9, 10]
        for row in rows:
            broken = x.copy()
            broken[row, 2] = np.nan
            assert np.isnan(run(name, broken, classes, extra).value)
    if TABLE[name][0] in SECOND:
        second_of(name, extra)[0, ..., 1] = np.nan
        assert np.isnan(run(name, x, labels, extra).value)


@every_loss
def test_bfloat16_is_computed_in_float32(name):
    x, labels, extra = inputs()
    half = [jnp.asarray(array, jnp.bfloat16) for array in (x, second_of(name, extra))]
    value, gradients = compiled(name)(*half, labels, np.ones(B, bool))
    assert value.dtype == jnp.float32
    assert [gradient.dtype for gradient in gradients] == [jnp.bfloat16] * 2
    wide = [np.asarray(array, np.float32) for array in half]
    expected, slopes = compiled(name)(*wide, labels, np.ones(B, bool))
    close(value, expected, 1e-6)
    for gradient, slope in zip(gradients, slopes, strict=True):
        close(np.asarray(gradient, np.float32), slope, 2**-8)


@every_function
def test_float64_stays_float64(name):
    x, labels, extra = inputs()
    with jax.enable_x64(True):
        shape = jax.eval_shape(lambda x: call(name, x, labels, extra), x.astype(np.float64))
    assert shape.dtype == jnp.float64


@every_function
def test_labels_may_be_a_list(name, unchecked):
    x, labels, extra = inputs()
    close(call(name, x, labels.tolist(), extra), call(name, x, labels, extra))


@every_function
def test_vmap_equals_a_loop(name):
    batches = [inputs(seed) for seed in range(3)]
    labels, extra = batches[0][1], batches[0][2]
    xs = np.stack([x for x, _, _ in batches])
    arguments = second_of(name, extra), labels, np.ones(B, bool)
    together = jax.vmap(compiled(name), in_axes=(0, None, None, None))(xs, *arguments)
    for i, x in enumerate(xs):
        expected = compiled(name)(x, *arguments)
        jax.tree.map(lambda many, one, i=i: close(many[i], one), together, expected)


@every_function
def test_a_second_batch_does_not_recompile(name):
    run(name, *inputs())
    size = compiled(name)._cache_size()
    x, labels, extra = inputs(7)
    run(name, x, labels[::-1].copy(), extra, np.arange(B) != 3)
    assert compiled(name)._cache_size() == size


@every_function
def test_without_jit_the_loss_is_the_same_and_a_second_call_compiles_nothing(name):
    x, labels, extra = inputs()
    step = jax.value_and_grad(lambda x: call(name, x, labels, extra))
    close(step(x)[0], run(name, x, labels, extra).value)
    before = compilation.compiled().programs
    step(x)
    assert compilation.compiled().programs == before


@every_function
def test_inside_shard_map_each_device_has_the_loss_of_its_rows(name):
    """Proxies are the same on all devices, so that their gradient is the sum over devices."""
    x, labels, extra = inputs(b=2 * B)
    kind, second = TABLE[name][0], second_of(name, extra)
    by_rows = P("b") if kind == "views" else P()

    def step(x, second, labels):
        def loss(x, second):
            return call(name, x, labels, {SECOND.get(kind): second})

        value, gradients = jax.value_and_grad(loss, argnums=(0, 1))(x, second)
        return value[None], gradients

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("b",))
    specs = {"in_specs": (P("b"), by_rows, P("b")), "out_specs": (P("b"), (P("b"), by_rows))}
    values, gradients = jax.jit(jax.shard_map(step, mesh=mesh, **specs))(x, second, labels)
    halves = [
        run(name, x[i], labels[i], {key: a[i] if key == "other" else a for key, a in extra.items()})
        for i in (slice(0, B), slice(B, None))
    ]
    close(values, [half.value for half in halves])
    close(gradients[0], np.concatenate([half.gradient for half in halves]))
    join = np.concatenate if kind == "views" else sum
    close(gradients[1], join([half.second for half in halves]))


@every_function
def test_no_loss_stores_an_array_of_b_cubed(name):
    """64 MiB for b = 1,024 and d = 128, with the gradient, are 16 arrays of b^2.

    Labels are an argument, so this is the program for classes of any size.
    """
    x, labels = (
        jax.ShapeDtypeStruct((1024, 128), np.float32),
        jax.ShapeDtypeStruct((1024,), np.int32),
    )
    shapes = {"proxies": (256, 128), "subproxies": (256, SUB, 128), "other": (1024, 128)}
    extra = {k: jax.ShapeDtypeStruct(v, np.float32) for k, v in shapes.items()}
    function = jax.jit(jax.value_and_grad(lambda x, y, e: call(name, x, y, e)))
    memory = function.lower(x, labels, extra).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 64 * 2**20


@every_loss
def test_only_unnormalized_losses_depend_on_the_lengths_of_rows(name):
    x, labels, extra = inputs()
    lengths = np.linspace(0.5, 2, B, dtype=np.float32)[:, None]
    result, scaled = run(name, x, labels, extra), run(name, x * lengths, labels, extra)
    if name in UNNORMALIZED:
        assert abs(scaled.value - result.value) > 1e-3
    else:
        close(scaled.value, result.value)
        close(scaled.gradient * lengths, result.gradient)


@every_function
def test_an_unknown_keyword_raises(name):
    x, labels, extra = inputs()
    with pytest.raises(TypeError, match="tempratur"):
        call(name, x, labels, extra, tempratur=1)
