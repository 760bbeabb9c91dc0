"""Properties of all proxy losses: masks, order, lengths, labels, precision, messages."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from naive_proxies import CENTERED, NAIVE, compiled, each_loss, naive_proxy_anchor, proxy_data
from numeric import assert_near

from dmljax import losses, ops

DEPEND_ON_LENGTHS = {"sphereface", "large_margin_softmax"}  # on the lengths of embeddings


@each_loss
def test_masked_rows_do_not_matter(name):
    """Their content changes no bit of the loss. The comparison with the peer tests the mean."""
    x, y, w = proxy_data(name)
    where = np.array([True, False, True, True, False, True])
    expected, (dx, dw) = compiled(name)(x, w, y, where)
    np.testing.assert_allclose(expected, NAIVE[name](x[where], y[where], w), rtol=1e-4)
    x[1], x[4], y[1], y[4] = np.nan, 0, -1, 99
    value, slopes = compiled(name)(x, w, y, where)
    assert value == expected
    np.testing.assert_array_equal(slopes[0], dx)
    np.testing.assert_array_equal(slopes[1], dw)
    assert not np.any(dx[~where])


def test_wrong_labels_of_masked_rows_do_not_raise():
    x, y, w = proxy_data("cosface")
    where = np.arange(6) > 1
    expected = losses.cosface(x, y, w, where=where)
    y[:2] = -1, 99
    assert losses.cosface(x, y, w, where=where) == expected


@each_loss
def test_an_empty_mask_gives_0(name):
    x, y, w = proxy_data(name)
    value, slopes = compiled(name)(x, w, y, np.zeros(6, bool))
    assert value == 0
    assert not any(np.any(slope) for slope in slopes)


@each_loss
def test_finite_on_parallel_opposite_and_zero_rows(name):
    x, y, w = proxy_data(name)
    near = w[:, 0] if name in CENTERED else w
    x[0] = 3 * near[0]  # parallel to its own proxy
    x[1] = near[0]
    x[2] = -2 * near[1]  # and opposite
    x[3] = x[4]  # twice the same
    x[5] = 0
    w[3] = 0
    value, slopes = compiled(name)(x, w, y)
    assert np.isfinite(value)
    assert all(np.isfinite(slope).all() for slope in slopes)
    for size in (1e-30, 1e30):
        value, slopes = compiled(name)(x * np.float32(size), w, y)
        assert np.isfinite(value) and all(np.isfinite(slope).all() for slope in slopes)


@pytest.mark.parametrize("name", ["cosface", "soft_triple", "proxy_anchor"])
def test_half_precision_is_computed_in_float32(name):
    x, y, w = (jnp.asarray(a) for a in proxy_data(name))
    x, w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
    value, (dx, dw) = compiled(name)(x, w, y)
    wide, (wide_dx, wide_dw) = compiled(name)(x.astype(jnp.float32), w.astype(jnp.float32), y)
    assert value.dtype == jnp.float32 and dx.dtype == dw.dtype == jnp.bfloat16
    np.testing.assert_allclose(value, wide, rtol=1e-6)
    assert_near(dx.astype(jnp.float32), wide_dx, 2**-8)
    assert_near(dw.astype(jnp.float32), wide_dw, 2**-8)


@each_loss
def test_order_names_of_classes_and_lengths_do_not_matter(name):
    x, y, w = proxy_data(name)
    value, (dx, _) = compiled(name)(x, w, y)
    order = np.array([4, 2, 0, 5, 1, 3])
    moved, (moved_dx, _) = compiled(name)(x[order], w, y[order])
    np.testing.assert_allclose(moved, value, rtol=1e-5)
    assert_near(moved_dx, dx[order], 1e-5)
    renamed = np.array([2, 0, 3, 1])
    np.testing.assert_allclose(
        compiled(name)(x, w[np.argsort(renamed)], renamed[y])[0], value, rtol=1e-5
    )
    longer = compiled(name)(7 * x, w, y)[0]
    assert np.isclose(longer, value, rtol=1e-5) == (name not in DEPEND_ON_LENGTHS)


@each_loss
def test_a_label_out_of_range_is_named_or_gives_nan(name, unchecked):
    x, y, w = proxy_data(name)
    for bad in (4, -1):
        y[2] = bad
        with pytest.raises(ValueError, match=rf"label {bad} in row 2 .* the 4 classes"):
            getattr(losses, name)(x, y, w)
        value, (_, dw) = compiled(name)(x, w, y)
        assert np.isnan(value) and np.isnan(dw).any()
    with pytest.raises(ValueError, match=r"labels are <U\d+: give integers \(np.unique"):
        getattr(losses, name)(x, y.astype(str), w)


@each_loss
def test_a_nan_makes_the_loss_nan(name):
    x, y, w = proxy_data(name)
    x[3, 0] = np.nan
    assert np.isnan(compiled(name)(x, w, y)[0])
    x, y, w = proxy_data(name)
    w[0] = np.nan
    assert np.isnan(compiled(name)(x, w, y)[0])


@pytest.mark.parametrize("name", ["cosface", "soft_triple", "sphereface", "proxy_anchor"])
def test_with_one_class_nothing_is_pushed(name):
    x, y, w = proxy_data(name, c=1)
    value, slopes = compiled(name)(x, w, y * 0)
    if name == "proxy_anchor":  # all pull
        np.testing.assert_allclose(value, naive_proxy_anchor(x, y * 0, w), rtol=1e-5)
    else:
        assert value == 0
        assert not any(np.any(slope) for slope in slopes)


@each_loss
def test_the_mean_is_over_the_entries_and_weights_multiply_them(name):
    x, y, w = proxy_data(name)
    where = np.array([True, True, True, False, False, True])

    @jax.jit
    def entries_and_total(x, y, w, where, weigh):
        fn = functools.partial(getattr(losses, name), x, y, w, where=where)
        return fn(reduce_fn=None), fn(reduce_fn=ops.weighted(weigh, ops.sum))

    by_class = name == "proxy_anchor"
    weights = np.array([1.0, 2.0, 0.5, 3.0], np.float32)
    weigh = weights if by_class else weights[y]
    entries, total = entries_and_total(x, y, w, where, weigh)
    assert entries.shape == ((4,) if by_class else (6,))
    assert by_class or not np.any(entries[~where])
    np.testing.assert_allclose(total, np.sum(entries * weigh), rtol=1e-5)
    if not by_class:
        mean = compiled(name)(x, w, y, where)[0]
        np.testing.assert_allclose(mean, entries.sum() / 4, rtol=1e-6)


@each_loss
def test_wrong_arguments_are_named(name, unchecked):
    x, y, w = proxy_data(name)
    fn = getattr(losses, name)
    with pytest.raises(ValueError, match=r"proxies must be \[c .*d = 3"):
        fn(x, y, w[0])
    with pytest.raises(ValueError, match=r"proxies must be \[c .*d = 3"):
        fn(x, y, w[..., :2])
    other, centers = (w[:, None], 0) if w.ndim == 2 else (w[:, 0], 10)
    with pytest.raises(ValueError, match=rf"not of shape .*--config.method.centers={centers}"):
        fn(x, y, other)
    with pytest.raises(ValueError, match="proxies must be floats"):
        fn(x, y, w.astype(int))
    with pytest.raises(ValueError, match=r"labels must be int \[6\]"):
        fn(x, y[:5], w)
    with pytest.raises(ValueError, match=r"labels must be int \[6\]"):
        fn(x, y.astype(np.float32), w)
    with pytest.raises(ValueError, match="where must be bool"):
        fn(x, y, w, where=np.ones(6))


def test_all_integer_types_of_labels_give_the_same_loss():
    x, y, w = proxy_data("cosface")
    expected = compiled("cosface")(x, w, y)[0]
    for dtype in (np.uint8, np.int8, np.int16, np.uint32):
        value = compiled("cosface")(x, w, y.astype(dtype))[0]
        np.testing.assert_allclose(value, expected, rtol=1e-6)
