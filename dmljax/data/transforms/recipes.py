"""Recipes: the operations for training and for evaluation, as published systems compose them.

A recipe is a function of keywords that returns a list of operations. Configs name recipes and
single operations: `config.eval_transform = dict(name='standard_eval', size=224)`.
"""

from dmljax.data.transforms.operations import (
    Operation,
    center_crop,
    color_jitter,
    crop,
    distort,
    pad_to_square,
    random_crop,
    random_erasing,
    random_flip,
    random_resized_crop,
    resize,
    resize_shorter_side,
)

__all__ = [
    "abe_eval",
    "abe_train",
    "dvml_eval",
    "dvml_train",
    "glyphs_train",
    "graph_eval",
    "graph_train",
    "small_eval",
    "small_train",
    "squash_eval",
    "standard_eval",
    "standard_train",
    "unchanged",
]


def unchanged() -> list[Operation]:
    """Returns the image itself, for data sets whose images are small and have one size."""
    return []


def standard_train(
    *,
    size: int = 224,
    shorter: int | None = None,
    area: tuple[float, float] = (0.08, 1.0),
    flip: float = 0.5,
    color: float = 0.0,
    antialias: bool = True,
    filter: str = "bilinear",
    scaled_decode: bool = False,
) -> list[Operation]:
    """Cuts a random resized crop and flips it, as usual for ImageNet. The default for photographs.

    * `area`: the smallest and the largest fraction of the image that the crop covers.
    * `flip`: the probability of a mirror image.
    * `color`: the largest relative change of brightness, contrast and saturation; the hue changes
      by up to a quarter of it.
    * `shorter`: first resizes the shorter side, as the code of the multi-similarity loss does.
    * `antialias`, `filter`: as in `operations.resize`.
    * `scaled_decode`: large JPEGs may be decoded at a fraction of their size.
    """
    for name, value in {"flip": flip, "color": color}.items():
        if not 0 <= value <= 1:
            raise ValueError(f"standard_train: `{name}` must be between 0 and 1, got {value}")
    operations: list[Operation] = []
    if shorter is not None:
        operations.append(
            resize_shorter_side(
                size=shorter, antialias=antialias, filter=filter, scaled_decode=scaled_decode
            )
        )
    crop_scaled = scaled_decode and shorter is None
    operations += [
        random_resized_crop(
            size=size, area=area, antialias=antialias, filter=filter, scaled_decode=crop_scaled
        ),
        random_flip(probability=flip),
    ]
    if color:
        amounts = dict.fromkeys(("brightness", "contrast", "saturation"), color)
        operations.append(color_jitter(**amounts, hue=color / 4))
    return operations


def shorter_of(size: int) -> int:
    """Returns the shorter side from which a square of side `size` is cut, unless a config sets it.

    It is 256 / 224 times `size`, rounded to the nearest multiple of 8: 256 for crops of 224 and of
    227, 128 for 112, 72 for 64.

    >>> [shorter_of(size) for size in (64, 112, 224, 227, 288)]
    [72, 128, 256, 256, 328]
    """
    return max(size, 8 * round(size / 7))


def standard_eval(
    *,
    size: int = 224,
    shorter: int | None = None,
    antialias: bool = True,
    filter: str = "bilinear",
    scaled_decode: bool = False,
) -> list[Operation]:
    """Resizes the shorter side to `shorter`, then cuts the central square of side `size`.

    By default, `shorter` is `shorter_of(size)`, so that the crop shows seven eighths of a side.
    `scaled_decode` is as in `standard_train`.
    """
    return [
        resize_shorter_side(
            size=shorter_of(size) if shorter is None else shorter,
            antialias=antialias,
            filter=filter,
            scaled_decode=scaled_decode,
        ),
        center_crop(size=size),
    ]


def squash_eval(
    *, size: int = 224, filter: str = "bilinear", scaled_decode: bool = False
) -> list[Operation]:
    """Resizes both sides to `size`, whatever the aspect ratio, as SigLIP and DINOv3 do.

    `scaled_decode` is as in `standard_train`.
    """
    return [resize(height=size, width=size, filter=filter, scaled_decode=scaled_decode)]


def graph_train(*, size: int = 227, red_std: float = 0.229) -> list[Operation]:
    """Crops, flips and erases at random, as graph attention over the batch (`GL_orig_RE`).

    The published code erases after normalization, with the mean color of CIFAR in normalized
    units. So the color in pixels depends on the standard deviations. `red_std=0.299` is a typing
    error of the published code; give the same value to `normalizations.imagenet`.
    """
    mean, std, cifar_mean = (0.485, 0.456, 0.406), (red_std, 0.224, 0.225), (0.4914, 0.4822, 0.4465)
    fill = tuple(round(255 * (v * s + m)) for v, s, m in zip(cifar_mean, std, mean, strict=True))
    return [*standard_train(size=size), random_erasing(fill=fill)]


def graph_eval(*, size: int = 227, shorter: int | None = None) -> list[Operation]:
    """Resizes the shorter side to 256 and crops the central 227, as graph attention does."""
    return standard_eval(size=size, shorter=shorter)


def dvml_train(*, size: int = 227) -> list[Operation]:
    """Squashes to 256, crops 227 at random and flips, as DVML (Lin et al., 2018)."""
    side = shorter_of(size)
    squashed = resize(height=side, width=side, antialias=False)
    return [squashed, random_crop(size=size), random_flip()]


def dvml_eval(*, size: int = 227) -> list[Operation]:
    """Squashes to 256, crops 227 at offset 15, as DVML (torchvision would use 14)."""
    side = shorter_of(size)
    offset = (side - size + 1) // 2
    squashed = resize(height=side, width=side, antialias=False)
    return [squashed, crop(top=offset, left=offset, size=size)]


def abe_train(*, size: int = 224) -> list[Operation]:
    """Pads to a square of 256, crops 224 at random and flips, as ABE (Kim et al., 2018)."""
    return [pad_to_square(size=shorter_of(size)), random_crop(size=size), random_flip()]


def abe_eval(*, size: int = 224) -> list[Operation]:
    """Pads to a square of 256 and crops the central 224, as ABE."""
    return [pad_to_square(size=shorter_of(size)), center_crop(size=size)]


def small_train(*, size: int = 64) -> list[Operation]:
    """Crops an area of 0.16 to 1 and flips, as the metric-learning review on TinyImageNet."""
    return standard_train(size=size, shorter=size, area=(0.16, 1.0))


def small_eval(*, size: int = 64) -> list[Operation]:
    """Resizes the shorter side to `size` and crops, as that review on TinyImageNet."""
    return standard_eval(size=size, shorter=size)


def glyphs_train() -> list[Operation]:
    """Distorts mildly, differently at every step. Never flips, which changes characters.

    It is milder than the distortion that each glyph already has, since both add up.
    """
    return [distort(rotation=10, shear=0.15, scale=(0.85, 1.15), shift=2, noise=10)]
