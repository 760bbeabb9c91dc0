"""Normalizations, the input that weights were trained on: `uint8 [b h w c]` to float32.

The functions are plain arithmetic on NumPy or JAX arrays. The train step calls them on the device,
so that images cross to it in one byte per value. `inputs` has the same numbers as data, which
`convert` writes into its files.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["INPUTS", "caffe", "caffe_bn", "imagenet", "inputs", "rgb", "title", "unit"]

# Values of a config's `normalize` that several published nets expect.
HALF: dict[str, Any] = {"name": "rgb", "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
CLIP: dict[str, Any] = {
    "name": "rgb",
    "mean": (0.48145466, 0.4578275, 0.40821073),
    "std": (0.26862954, 0.26130258, 0.27577711),
}
# EfficientNet-lite: (x - 127) / 128 of pixels from 0 to 255.
LITE: dict[str, Any] = {"name": "rgb", "mean": [127 / 255] * 3, "std": [128 / 255] * 3}

_RGB = {"channels": "RGB", "range": [0, 1]}
_BGR = {"channels": "BGR", "range": [0, 255], "std": [1, 1, 1]}
INPUTS: dict[str, dict[str, Any]] = {
    "imagenet": _RGB | {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]},
    "caffe": _BGR | {"mean": [104, 117, 123]},
    "caffe_bn": _BGR | {"mean": [104, 117, 128]},
    "unit": _RGB | {"mean": [0, 0, 0], "std": [1, 1, 1]},
}


def inputs(spec: str | Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the input that the value of `config.normalize` makes, as data; None if it is unknown.

    >>> inputs({"name": "rgb", "mean": (0, 0, 0), "std": (1, 1, 1)}) == inputs("unit")
    True
    """
    options = {"name": spec} if isinstance(spec, str) else spec
    if options["name"] != "rgb":
        return INPUTS.get(options["name"])
    return _RGB | {name: list(options.get(name, ())) for name in ("mean", "std")}


def title(spec: str | Mapping[str, Any]) -> str:
    """Returns the value of `config.normalize` in short form, for a line that a user reads.

    >>> title("imagenet")
    'RGB 0 to 1, mean 0.485 0.456 0.406, std 0.229 0.224 0.225'
    >>> title("unit")
    'RGB 0 to 1'
    >>> title({"name": "imagenet", "red_std": 0.299}), title("my_module:my_function")
    ('imagenet(red_std=0.299)', 'my_module:my_function')
    """
    options = {"name": spec} if isinstance(spec, str) else dict(spec)
    numbers = inputs(options)
    arguments = {k: v for k, v in options.items() if k not in ("name", "force")}
    if numbers is None or (arguments and options["name"] != "rgb"):
        text = ", ".join(f"{name}={value}" for name, value in arguments.items())
        return f"{options['name']}({text})" if text else options["name"]
    low, high = numbers["range"]
    text = f"{numbers['channels']} {low} to {high}"
    if set(numbers["mean"]) == {0} and set(numbers["std"]) == {1}:
        return text
    mean, std = (" ".join(f"{x:.4g}" for x in numbers[name]) for name in ("mean", "std"))
    return f"{text}, mean {mean}, std {std}"


def rgb(images: Any, *, mean: Sequence[float], std: Sequence[float]) -> Any:
    """Scales RGB to 0 to 1, subtracts `mean` and divides by `std`."""
    if not (len(mean) == len(std) == 3 and min(mean) >= 0 and max(mean) <= 1 and min(std) > 0):
        raise ValueError(
            f"mean and std are three numbers each, of RGB from 0 to 1, not {mean} and {std}: "
            "divide numbers of pixels from 0 to 255 by 255"
        )
    return (images.astype(np.float32) / np.float32(255) - _constant(*mean)) / _constant(*std)


def imagenet(images: Any, *, red_std: float = 0.229) -> Any:
    """Normalizes RGB from 0 to 1 by ImageNet's mean and std: torchvision, timm, DINO.

    `red_std=0.299` is a typing error in the published code of the graph system.
    """
    return rgb(images, mean=(0.485, 0.456, 0.406), std=(red_std, 0.224, 0.225))


def caffe(images: Any) -> Any:
    """Subtracts (104, 117, 123) from BGR from 0 to 255: Caffe's GoogLeNet."""
    return images[..., ::-1].astype(np.float32) - _constant(104, 117, 123)


def caffe_bn(images: Any) -> Any:
    """Subtracts (104, 117, 128) from BGR from 0 to 255: the published BN-Inception."""
    return images[..., ::-1].astype(np.float32) - _constant(104, 117, 128)


def unit(images: Any) -> Any:
    """Scales RGB to 0 to 1."""
    return images.astype(np.float32) / np.float32(255)


def _constant(*values: float) -> np.ndarray:
    return np.array(values, np.float32).reshape(1, 1, 1, -1)
