"""Random arrays for tests of layers, and their exchange with PyTorch."""

import numpy as np
import pytest

_rng = np.random.default_rng(0)


def normal(*shape):
    return _rng.normal(size=shape).astype(np.float32)


def to_torch(x):
    return pytest.importorskip("torch").from_numpy(np.array(x)).permute(0, 3, 1, 2)


def from_torch(x):
    return x.detach().permute(0, 2, 3, 1).numpy()
