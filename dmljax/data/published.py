"""Counts of the published data sets."""

from typing import NamedTuple


class Published(NamedTuple):
    """Numbers of classes and images, as the papers report them."""

    train_classes: int
    train_images: int
    test_classes: int
    test_images: int


PUBLISHED = {
    "cub200": Published(100, 5_864, 100, 5_924),
    "cars196": Published(98, 8_054, 98, 8_131),
    "sop": Published(11_318, 59_551, 11_316, 60_502),
    "inshop": Published(3_997, 25_882, 3_985, 14_218 + 12_612),
    "tiny_imagenet": Published(200, 100_000, 200, 10_000),
    "mnist": Published(10, 60_000, 10, 10_000),
    "glyphs": Published(164, 2_624, 163, 2_608),
}
