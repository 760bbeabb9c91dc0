"""Small nets with a file of pretrained weights."""

import functools
import json

import jax
import numpy as np
import safetensors.numpy
from flax import traverse_util

from dmljax.config import registry
from dmljax.weights.loading import TORCH

VIT = {"name": "vit_s16", "width": 16, "heads": 2, "depth": 3, "patch": 4, "image_size": 12}
RESNET = {"name": "resnet18", "width": 8}


def with_weights(folder, net=VIT, *, seed=7, size=12):
    """The net's spec with a file of random weights, in PyTorch's names and axes."""
    file = folder / f"weights{seed}.safetensors"
    safetensors.numpy.save_file(_tensors(json.dumps(net), seed, net.get("image_size", size)), file)
    return net | {"weights": str(file)}


@functools.cache
def _tensors(net, seed, size):
    spec = {k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(net).items()}
    variables = registry.resolve("net", spec)().init(
        jax.random.key(seed), np.zeros((1, size, size, 3), np.float32), train=False
    )
    tensors = {}
    for path, array in traverse_util.flatten_dict(jax.device_get(variables)).items():
        array = np.asarray(array)
        axes = {4: (3, 2, 0, 1), 2: (1, 0)}.get(array.ndim, range(array.ndim))
        tensors[TORCH.name_fn(path)] = np.ascontiguousarray(array.transpose(axes))
    return tensors
