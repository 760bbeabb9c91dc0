"""Augmentation for training, and the geometry of evaluation.

A transform is a function `(image, rng, *, ...) -> image` of a `uint8 [h w c]` image and a
`numpy.random.Generator`. It changes neither the input nor any global state. Transforms for
evaluation ignore `rng`. Mean and deviation are not subtracted here but on the device
(`dmljax.weights.preprocessing`), so that a batch is sent there with one byte per value.

Configs usually name one of the transforms of the published systems: `graph_train`, `graph_eval`,
`dvml_train`, ... They are made of the others. Images are resized with Pillow's antialiased
bilinear filter, as torchvision does for PIL images; `filter='bicubic'` chooses Pillow's bicubic
one. `squash`, and every transform with `antialias=False`, uses OpenCV's plain bilinear filter
instead, which is several times as fast.
"""

from dmljax.data.transforms.colors import color_jitter, random_erasing
from dmljax.data.transforms.distortion import distort
from dmljax.data.transforms.geometry import (
    center_crop,
    pad,
    random_crop,
    random_flip,
    random_resized_crop,
    resize,
    squash,
    unchanged,
)
from dmljax.data.transforms.recipes import (
    abe_eval,
    abe_train,
    dvml_eval,
    dvml_train,
    glyphs_train,
    graph_eval,
    graph_train,
    small_eval,
    small_train,
    squash_eval,
    standard_eval,
    standard_train,
)

__all__ = [
    "abe_eval",
    "abe_train",
    "center_crop",
    "color_jitter",
    "distort",
    "dvml_eval",
    "dvml_train",
    "glyphs_train",
    "graph_eval",
    "graph_train",
    "pad",
    "random_crop",
    "random_erasing",
    "random_flip",
    "random_resized_crop",
    "resize",
    "small_eval",
    "small_train",
    "squash",
    "squash_eval",
    "standard_eval",
    "standard_train",
    "unchanged",
]
