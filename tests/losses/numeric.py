"""Numeric gradients of plain numpy functions, and a comparison of arrays."""

import numpy as np


def gradient(fn, x, step=1e-6):
    """Central differences of `fn(x)` in float64."""
    x = np.array(x, np.float64)
    slope = np.zeros_like(x)
    for i in np.ndindex(x.shape):
        value = x[i]
        x[i] = value + step
        up = fn(x)
        x[i] = value - step
        slope[i] = (up - fn(x)) / (2 * step)
        x[i] = value
    return slope


def assert_near(ours, theirs, tolerance):
    """Fails if an entry differs by more than `tolerance` times the largest entry of `theirs`."""
    theirs = np.asarray(theirs)
    scale = max(np.abs(theirs).max(), 1e-3)
    np.testing.assert_allclose(np.asarray(ours), theirs, rtol=0, atol=tolerance * scale)
