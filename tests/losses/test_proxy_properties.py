"""Properties of all proxy losses beside the contract: labels, weights, messages."""

import functools

import jax
import numpy as np
import pytest
from naive_proxies import compiled, each_loss, naive_proxy_anchor, proxy_data

from dmljax import losses, ops


@each_loss
def test_names_of_classes_do_not_matter(name):
    x, y, w = proxy_data(name)
    renamed = np.array([2, 0, 3, 1])
    other = compiled(name)(x, w[np.argsort(renamed)], renamed[y])[0]
    np.testing.assert_allclose(other, compiled(name)(x, w, y)[0], rtol=1e-5)


two_losses = pytest.mark.parametrize("name", ["cosface", "soft_triple"])


@two_losses
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


@two_losses
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
