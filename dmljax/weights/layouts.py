"""Names and order of axes of the parameters in files, compared with a net.

Level by level, many published files use the names of our nets: 'layer1.0.bn1.weight' is
`params['layer1']['0']['bn1']['scale']`. Only the last level and the axes of kernels differ.
Published files with other names have a `NameMap` in `weights/families`. A net of one's own may have
an attribute `layout`, a `Layout`; then no name map is tried.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from dmljax.weights.name_maps import NameMap
from dmljax.weights.readers import Weights

# Names of classifiers, including auxiliary ones, or the first levels of these names.
CLASSIFIERS = {"aux1", "aux2", "classifier", "fc", "head", "last_linear", "loss1", "loss2", "loss3"}
CLASSIFIERS |= {"_fc", "head.fc"}
_MAIN_CLASSIFIERS = (
    *("fc", "classifier.1", "last_linear", "loss3.classifier", "head"),
    *("classifier", "head.fc", "_fc"),
)
_LEAVES = {"kernel": "weight", "scale": "weight", "mean": "running_mean", "var": "running_var"}
# One name per architecture, in the names of our nets, that no architecture below has.
_ARCHITECTURES = {
    "layer1.0.conv1.weight": "a resnet",
    "inception3a.branch1.conv.weight": "googlenet_bn, torchvision's",
    "inception_3a.1x1.weight": "googlenet, Caffe's",
    "inception_3a_1x1.weight": "bn_inception",
    "features.1.conv.0.0.weight": "a mobilenet_v2",
    "blocks.0.0.conv_dw.weight": "an efficientnet_lite",
    "_blocks.0._depthwise_conv.weight": "an efficientnet_lite",
    "stages.0.blocks.0.conv_dw.weight": "a convnext",
    "blocks.0.attn.qkv.weight": "a vit",
}


class Layout(NamedTuple):
    """The name and the axes under which a file stores a parameter of a Flax net."""

    name_fn: Callable  # path such as ('params', 'bn1', 'scale') -> name in the file
    top_fn: Callable  # name in the file -> first level of the parameter's path
    shape_fn: Callable  # shape in the net -> shape in the file
    value_fn: Callable  # array of the file -> array with the axes of the net


def _torch_name(path: Sequence[str]) -> str:
    return ".".join((*path[1:-1], _LEAVES.get(path[-1], path[-1])))


def _torch_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) == 4:  # HWIO to OIHW
        return shape[3], shape[2], shape[0], shape[1]
    return shape[::-1] if len(shape) == 2 else shape


def _from_torch(array: np.ndarray) -> np.ndarray:
    if array.ndim == 4:
        return array.transpose(2, 3, 1, 0)
    return array.T if array.ndim == 2 else array


def _unchanged(value: Any) -> Any:
    return value


TORCH = Layout(_torch_name, lambda name: name.split(".")[0], _torch_shape, _from_torch)


def layout_of(net: Any) -> Layout:
    """Returns how published files store the parameters of a net: its attribute `layout`, or
    `TORCH`.
    """
    return getattr(net, "layout", TORCH)


FLAX = Layout("/".join, lambda name: name.split("/")[1], _unchanged, _unchanged)


def torch_tensors(weights: Weights) -> dict[str, np.ndarray]:
    """Returns the tensors of a published file under PyTorch's names:
    'layer1.0.bn1.running_mean'.
    """
    tensors = {}
    for name, array in weights.tensors.items():
        if weights.layout == "onnx":
            name = re.sub("_([wb])_0$", lambda m: f".{'weight' if m[1] == 'w' else 'bias'}", name)
            if not jnp.issubdtype(array.dtype, jnp.floating):
                continue  # shapes that the graph computes with
        tensors[name.replace("/", ".")] = array
    if tensors and all(name.startswith("module.") for name in tensors):  # from DataParallel
        tensors = {name.removeprefix("module."): array for name, array in tensors.items()}
    return {n: a for n, a in tensors.items() if not n.endswith(".num_batches_tracked")}


def classifier_size(tensors: Mapping[str, np.ndarray]) -> int | None:
    """Returns the number of classes of the main classifier, or None without a classifier."""
    for name in _MAIN_CLASSIFIERS:
        weight = tensors.get(f"{name}.weight")
        if weight is not None:
            return int(weight.shape[-2]) if weight.ndim >= 2 else None
    return None


def architecture(tensors: Mapping[str, np.ndarray], name_map: NameMap) -> str | None:
    """Describes the architecture of a file, for a message."""
    for name, words in _ARCHITECTURES.items():
        if all(source in tensors for source in name_map.source(name).names):
            return words
    return None
