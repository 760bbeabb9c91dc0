"""Values and images that a name determines, for files that others' code also computes with."""

import zlib

import numpy as np


def values(name, shape):
    """Values of a tensor with this name, with which activations keep their scale."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    if name.endswith("running_var") or (name.endswith("weight") and len(shape) == 1):
        array = rng.uniform(0.5, 1.5, shape)
    elif name.endswith("weight"):
        array = rng.normal(0, np.sqrt(2 / np.prod(shape[1:])), shape)
    else:
        array = rng.normal(0, 0.2, shape)
    return array.astype(np.float32)


def images(shape):
    return np.random.default_rng(7).normal(size=shape).astype(np.float32)
