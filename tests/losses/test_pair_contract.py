"""Properties of every pair loss: references, forms of labels, ignored pairs, miners."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_contract import PAIRS, TABLE, B, call, close, function_of, inputs, run

from dmljax import ops


# `pnp` and `smooth_ap` also rank the anchor if a batch is compared with itself.
@pytest.mark.parametrize(
    "name", [case for case in PAIRS if not case.values[0].startswith(("pnp", "smooth_ap"))]
)
def test_the_batch_as_references_gives_the_loss_of_the_batch(name):
    x, labels, _ = inputs()
    pairs = ops.pairs(labels)
    function = functools.partial(function_of(name), **TABLE[name][1])
    explicit = jax.value_and_grad(lambda x: function(x, pairs, references=x + 0.0))
    value, gradient = jax.jit(explicit)(x)
    expected = run(name, x, labels, {})
    close(value, expected.value)
    close(gradient, expected.gradient)


@pytest.mark.parametrize("name", PAIRS)
def test_multi_hot_labels_and_pairs_give_the_same_value(name):
    x, labels, _ = inputs()
    expected = run(name, x, labels, {}).value
    forms = [np.eye(4, dtype=bool)[labels], ops.pairs(labels)]
    for value in jax.jit(lambda x: [call(name, x, form, None) for form in forms])(x):
        close(value, expected)


@pytest.mark.parametrize("name", PAIRS)
def test_rows_without_pairs_do_not_change_the_sum(name):
    x, labels, _ = inputs()
    is_used = np.arange(B) % 4 != 1
    pair_counts = is_used[:, None] & is_used[None, :]
    pairs = ops.Pairs(*(np.asarray(mask) & pair_counts for mask in ops.pairs(labels)))
    reduction = {"reduce_fn": ops.sum} if name != "histogram" else {}
    if name == "ranked_list":
        pytest.skip("the published weights count every reference")

    @jax.jit
    def both_ways(x):
        without_rows = call(name, x[is_used], labels[is_used], None, **reduction)
        return call(name, x, pairs, None, **reduction), without_rows

    close(*both_ways(x))


@pytest.mark.parametrize("name", PAIRS)
def test_a_miner_replaces_the_pairs(name):
    x, labels, _ = inputs()
    selected = np.random.default_rng(0).random((B, B)) < 0.7
    selected_pairs = ops.Pairs(*(np.asarray(mask) & selected for mask in ops.pairs(labels)))

    @jax.jit
    def both_ways(x):
        mined_distances = []

        def mine(distances, pairs):
            mined_distances.append(distances)
            return ops.Pairs(pairs.positives & selected, pairs.negatives & selected)

        mined = call(name, x, labels, None, mine_fn=mine)
        return mined, call(name, x, selected_pairs, None), mined_distances[0]

    mined, without_miner, distances = both_ways(x)
    if name != "n_pairs":  # with ops.Pairs, it derives the classes from the pairs
        close(mined, without_miner)
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    np.testing.assert_allclose(
        distances, np.linalg.norm(unit[:, None] - unit[None], axis=-1), atol=1e-6
    )


@pytest.mark.parametrize("name", PAIRS)
def test_without_a_reduction_the_loss_is_an_array_of_entries(name):
    x, labels, _ = inputs()
    reductions = (None, ops.sum)
    entries_and_total = jax.jit(
        lambda where: [call(name, x, labels, None, where=where, reduce_fn=fn) for fn in reductions]
    )
    for where in (np.ones(B, bool), np.arange(B) % 3 < 2):
        entries, total = entries_and_total(where)
        assert entries.shape[0] == B and not entries[~where].any()
        close(jnp.sum(entries), total)


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
