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
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P

from dmljax import losses, ops
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
FUNCTIONS = [name for name in TABLE if ":" not in name]
PAIRS = [name for name in FUNCTIONS if TABLE[name][0] == "pair"]


# Losses that do not normalize embeddings, and those of them that square them.
SQUARED = {"semihard_triplet", "vicreg", "label_smoothed_cross_entropy", "center_invariant", "lp"}
UNNORMALIZED = {*SQUARED, "sphereface", "large_margin_softmax", "zero_mean"}


# The second array of vectors, which gets a gradient as the embeddings do.
SECOND = {"proxy": "proxies", "subproxy": "subproxies", "views": "other"}


every_loss = pytest.mark.parametrize("name", TABLE)
every_function = pytest.mark.parametrize("name", FUNCTIONS)
every_pair_loss = pytest.mark.parametrize("name", PAIRS)


def call(name, x, labels, extra, **keywords):
    kind, defaults = TABLE[name]
    function = functools.partial(function_of(name), **defaults, **keywords)
    if kind == "vectors":
        return function(x)
    if kind == "views":
        return function(x, extra["other"])
    return function(x, labels, *([extra[SECOND[kind]]] if kind in SECOND else []))


def second_of(name, extra):
    return extra[SECOND[TABLE[name][0]]] if TABLE[name][0] in SECOND else np.zeros(0, np.float32)


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


TOGETHER = 16


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


def value_and_gradients(name, **options):
    def loss(x, second, labels, where):
        return call(name, x, labels, {SECOND.get(TABLE[name][0]): second}, where=where, **options)

    return jax.value_and_grad(loss, argnums=(0, 1))


@functools.cache
def compiled(name):
    """Compiles the value and gradients of 16 batches, the one program that most laws read.

    `vmap` makes it, and the laws compare it with batches that are computed by themselves.
    """
    return jax.jit(jax.vmap(value_and_gradients(name)))


def run_all(name, cases):
    """Returns the result of every case `(x, labels, extra, where)`; `where` may be left out."""
    rows = [
        (x, second_of(name, extra), labels, *(where or [np.ones(B, bool)]))
        for x, labels, extra, *where in cases
    ]
    results = []
    for start in range(0, len(rows), TOGETHER):
        some = rows[start : start + TOGETHER]
        stacked = map(np.stack, zip(*(some + some[-1:] * (TOGETHER - len(some))), strict=True))
        value, gradients = jax.device_get(compiled(name)(*stacked))
        results += [Result(*row) for row in zip(value, *gradients, strict=True)][: len(some)]
    return results


def run(name, *case):
    return run_all(name, [case])[0]


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
def test_masking_a_row_equals_dropping_it_without_jit_and_vmap(name, unchecked):
    x, labels, extra = inputs()
    where = np.ones(B, bool)
    where[[4, 5, 6, 9, 10]] = False  # two rows are then alone in their classes
    x_with_nan = np.where(where[:, None], x, np.nan)
    extra_with_nan = extra | {"other": np.where(where[:, None], extra["other"], np.nan)}
    other_labels = np.where(where, labels, -7 + 99 * (np.arange(B) % 2))  # no classes
    cases = (x, labels, extra, where), (x_with_nan, other_labels, extra_with_nan, where)
    plain, masked = run_all(name, cases)
    jax.tree.map(np.testing.assert_array_equal, masked, plain)
    dropped_extra = extra | {"other": extra["other"][where]}
    arguments = x[where], second_of(name, dropped_extra), labels[where].tolist(), None
    value, (gradient, second) = value_and_gradients(name)(*arguments)
    close(masked.value, value)
    close(masked.gradient[where], gradient)
    assert not masked.gradient[~where].any()
    by_rows = TABLE[name][0] == "views"
    close(masked.second[where] if by_rows else masked.second, second)
    assert not by_rows or not masked.second[~where].any()
    before = compilation.compiled().programs
    value_and_gradients(name)(*arguments)
    assert compilation.compiled().programs == before


@every_loss
def test_the_order_of_rows_does_not_matter(name):
    x, labels, extra = inputs()
    order = np.random.default_rng(1).permutation(B)
    if name == "n_pairs":  # takes the first pair of every label: keep the order within labels
        order = np.array([9, 3, 0, 4, 6, 1, 10, 7, 2, 5, 8, 11])
    reordered = extra | {"other": extra["other"][order]}
    for classes in (labels, UNEQUAL):
        cases = (x, classes, extra), (x[order], classes[order], reordered)
        result, permuted = run_all(name, cases)
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
    is_pair_loss = TABLE[name][0] == "pair"
    if not is_pair_loss:
        extra["other"] = x
        for proxies in (extra["proxies"], extra["subproxies"].swapaxes(0, 1)[0]):
            proxies[0] = inputs()[0][0]  # parallel to a row
            proxies[1] = -2 * inputs()[0][4]  # and opposite
            proxies[3] = 0
    counts = (B, 2, 1, 0)
    cases = [
        (x, labels if is_pair_loss else labels % C, extra, np.arange(B) < counting)
        for labels in CLASSES.values()
        for counting in counts
    ]
    for result, counting in zip(run_all(name, cases), counts * len(CLASSES), strict=True):
        assert result.is_finite
        assert counting or result.is_zero
        if is_pair_loss:
            assert result.value >= -1e-5 and (counting > 1 or result.is_zero)


@every_loss
def test_a_nan_in_any_row_makes_the_loss_nan(name):
    x, labels, extra = inputs()
    cases = []
    for classes, partner in ((labels, 4), (UNEQUAL, 5)):
        # `n_pairs` takes the first pair of every label.
        for row in [0, 1, 3, partner, 6, 7, 9, 10] if name == "n_pairs" else range(B):
            broken = x.copy()
            broken[row, 2] = np.nan
            cases.append((broken, classes, extra))
    if TABLE[name][0] in SECOND:
        broken_extra = jax.tree.map(np.copy, extra)
        second_of(name, broken_extra)[0, ..., 1] = np.nan
        cases.append((x, labels, broken_extra))
    assert all(np.isnan(result.value) for result in run_all(name, cases))


def _equations(jaxpr):
    for equation in jaxpr.eqns:
        inner = list(jaxprs_in_params(equation.params))
        yield equation, bool(inner)
        for part in inner:
            yield from _equations(part)


@every_function
def test_bfloat16_is_computed_in_float32(name):
    x, labels, extra = inputs()
    half = [jnp.asarray(array, jnp.bfloat16) for array in (x, second_of(name, extra))]
    traced = jax.make_jaxpr(value_and_gradients(name))(*half, labels, np.ones(B, bool))
    assert [array.dtype for array in traced.out_avals] == [jnp.float32, *[jnp.bfloat16] * 2]
    for equation, has_inner in _equations(traced.jaxpr):
        dtypes = [getattr(x.aval, "dtype", None) for x in (*equation.invars, *equation.outvars)]
        is_half = any(dtype == jnp.bfloat16 for dtype in dtypes)
        assert not is_half or has_inner or equation.primitive.name in CONVERSIONS, equation


CONVERSIONS = ("convert_element_type", "broadcast_in_dim")  # and zeros, as gradients


def _of_devices(name):
    """Value and gradients on two devices. Proxies are the same on both: their gradient is a sum."""
    by_rows = P("b") if TABLE[name][0] == "views" else P()

    def step(x, second, labels):
        value, gradients = value_and_gradients(name)(x, second, labels, None)
        return value[None], gradients

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("b",))
    specs = {"in_specs": (P("b"), by_rows, P("b")), "out_specs": (P("b"), (P("b"), by_rows))}
    return jax.shard_map(step, mesh=mesh, **specs)


@every_function
def test_inside_shard_map_a_loss_stays_float64_and_stores_no_array_of_b_cubed(name):
    """Labels are an argument, so this is the program for classes of any size."""
    shapes = {"proxy": (256, 128), "subproxy": (256, SUB, 128), "views": (2048, 128)}
    second = jax.ShapeDtypeStruct(shapes.get(TABLE[name][0], (0,)), np.float64)
    x = jax.ShapeDtypeStruct((2048, 128), np.float64)
    with jax.enable_x64(True):
        labels = jax.ShapeDtypeStruct((2048,), np.int32)
        traced = jax.make_jaxpr(_of_devices(name))(x, second, labels)
    assert {array.dtype for array in traced.out_avals} == {np.dtype(np.float64)}
    arrays = [array for equation, _ in _equations(traced.jaxpr) for array in equation.outvars]
    assert max(array.aval.size for array in arrays) <= 8 * 1024**2


@pytest.mark.parametrize("name", ["triplet", "fast_ap", "normalized_softmax", "clip"])
def test_inside_shard_map_each_device_has_the_loss_of_its_rows(name):
    x, labels, extra = inputs(b=2 * B)
    kind, second = TABLE[name][0], second_of(name, extra)
    values, gradients = jax.jit(_of_devices(name))(x, second, labels)
    halves = [
        (x[i], labels[i], {key: a[i] if key == "other" else a for key, a in extra.items()})
        for i in (slice(0, B), slice(B, None))
    ]
    halves = run_all(name, halves)
    close(values, [half.value for half in halves])
    close(gradients[0], np.concatenate([half.gradient for half in halves]))
    join = np.concatenate if kind == "views" else sum
    close(gradients[1], join([half.second for half in halves]))


@every_loss
def test_only_unnormalized_losses_depend_on_the_lengths_of_rows(name):
    x, labels, extra = inputs()
    lengths = np.linspace(0.5, 2, B, dtype=np.float32)[:, None]
    result, scaled = run_all(name, [(x, labels, extra), (x * lengths, labels, extra)])
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


USED = np.arange(B) % 4 != 1
SELECTED = np.random.default_rng(0).random((B, B)) < 0.7


@functools.cache
def forms(name):
    """Computes a pair loss in all forms of its arguments, by one program."""
    x, labels, _ = inputs()
    pairs = ops.Pairs(*map(np.asarray, ops.pairs(labels)))
    loss = functools.partial(function_of(name), **TABLE[name][1])
    distances = []

    def mine(d, pairs):
        distances.append(d)
        return ops.Pairs(*(mask & SELECTED for mask in pairs))

    @jax.jit
    def in_all_forms(x):
        return {
            "references": jax.value_and_grad(lambda x: loss(x, pairs, references=x + 0.0))(x),
            "multi-hot": loss(x, np.eye(4, dtype=bool)[labels]),
            "mined": loss(x, labels, mine_fn=mine),
            "selected": loss(x, ops.Pairs(*(mask & SELECTED for mask in pairs))),
            "of used rows": loss(
                x, ops.Pairs(*(mask & USED[:, None] & USED for mask in pairs)), reduce_fn=ops.sum
            ),
            "total": loss(x, labels, where=USED, reduce_fn=ops.sum),
            "entries": loss(x, labels, where=USED, reduce_fn=None),
            "distances": distances[0],
        }

    return in_all_forms(x)


@every_pair_loss
def test_the_batch_as_references_gives_the_loss_of_the_batch(name):
    if name in ("pnp", "smooth_ap"):
        pytest.skip("also ranks the anchor if a batch is compared with itself")
    value, gradient = forms(name)["references"]
    expected = run(name, *inputs())
    close(value, expected.value)
    close(gradient, expected.gradient)


@every_pair_loss
def test_a_miner_and_other_forms_of_labels_select_the_pairs(name):
    x, values = inputs()[0], forms(name)
    close(values["multi-hot"], run(name, *inputs()).value)
    if name != "n_pairs":  # with ops.Pairs, it derives the classes from the pairs
        close(values["mined"], values["selected"])
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    expected = np.linalg.norm(unit[:, None] - unit[None], axis=-1)
    np.testing.assert_allclose(values["distances"], expected, atol=1e-6)


@every_pair_loss
def test_entries_are_those_of_rows_with_pairs_and_add_up_to_the_sum(name):
    values = forms(name)
    assert values["entries"].shape[0] == B and not values["entries"][~USED].any()
    close(np.sum(values["entries"]), values["total"])
    if name != "ranked_list":  # the published weights count every reference
        close(values["of used rows"], values["total"])


@pytest.mark.parametrize("name", ["contrastive", "triplet"])
def test_labels_that_jax_cannot_hold_are_refused(name, unchecked):
    x, labels, _ = inputs()
    with pytest.raises(ValueError, match=r"^labels reach 12884901888, which int32 cannot hold"):
        call(name, x, labels.astype(np.int64) * 2**32, None)
    with pytest.raises(ValueError, match=r"^labels are <U\d+: give integers \(np.unique"):
        call(name, x, labels.astype(str), None)


@pytest.mark.parametrize("name", ["contrastive", "triplet", "angular", "smooth_ap"])
def test_a_function_that_is_no_reduction_is_one_line(name):
    x, labels, _ = inputs()
    form = r"a reduce_fn takes \(entries, where\) and returns \(total, count\)"
    for wrong, problem in ((jnp.mean, "mean fails"), (lambda e, w: e, "returns .*(Tracer|Array)")):
        with pytest.raises(TypeError, match=f"{form}.*({problem})"):
            call(name, x, labels, None, reduce_fn=wrong)
