"""The deviation within classes relative to that between them, against plain loops."""

import numpy as np
import pytest

from dmljax import metrics


def _naive(x, labels):
    mean = sum(x) / len(x)
    within = between = 0.0
    for row, label in zip(x, labels, strict=True):
        members = [other for other, name in zip(x, labels, strict=True) if name == label]
        center = sum(members) / len(members)
        within += sum((row - center) ** 2)
        between += sum((center - mean) ** 2)
    return (within / between) ** 0.5


@pytest.mark.parametrize("seed", range(4))
def test_class_deviation_against_loops(seed):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 5, 40) * 1000 - 7
    x = rng.normal(size=(40, 3)) * 3 + labels[:, None] / 500
    deviation = metrics.class_deviation(x, labels)
    assert isinstance(deviation, float)
    np.testing.assert_allclose(deviation, _naive(x, labels), rtol=1e-12)
    # Neither place, nor scale, nor a rotation, nor the order counts.
    turn = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    order = rng.permutation(40)
    np.testing.assert_allclose(
        metrics.class_deviation((5 * x @ turn + 9)[order], labels[order]), deviation, rtol=1e-9
    )


def test_class_deviation_at_its_limits():
    x = np.array([[0.0], [0.0], [2.0], [2.0]])
    assert metrics.class_deviation(x, np.array([0, 0, 1, 1])) == 0
    assert metrics.class_deviation(x, np.array([0, 1, 0, 1])) == np.inf
    assert np.isnan(metrics.class_deviation(x * 0, np.array([0, 1, 0, 1])))
    with pytest.raises(ValueError, match=r"labels have shape \(3,\)"):
        metrics.class_deviation(x, np.arange(3))
