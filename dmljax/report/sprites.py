"""Thumbnails of images, sixteen by sixteen to a sheet, encoded as WebP."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from PIL import Image

from dmljax.data.decode import UnreadableImage, file_bytes, to_pil
from dmljax.files import machine
from dmljax.metrics.sides import in_turn

CELLS = 16  # cells along each edge of a sheet
MISSING = 65535  # the cell of an item without a thumbnail
# The size of thumbnails by the number of images: (at most, pixels of an edge, WebP quality).
# 5,000 images stay below 8 MB.
THUMBNAIL_SIZES = ((5000, 64, 50), (8000, 48, 60))
# Of a larger set, some images get a thumbnail: (count, pixels of an edge, WebP quality).
THUMBNAILS_OF_MANY = (5500, 48, 60)


class Sprites(NamedTuple):
    """Sheets of thumbnails, and the cell of each item.

    `cells [n]`: sheet * 256 + row * 16 + column, or `MISSING`. `rows` are the rows of cells of each
    sheet.
    """

    sheets: list[bytes]
    rows: list[int]
    cells: np.ndarray


def thumbnail_size(count: int) -> tuple[int, int, int]:
    """Returns the count of thumbnails for `count` images, their side and their WebP quality."""
    for most, side, quality in THUMBNAIL_SIZES:
        if count <= most:
            return count, side, quality
    return THUMBNAILS_OF_MANY


def choose(labels: np.ndarray, needed: Sequence[int], count: int) -> np.ndarray:
    """Chooses `count` items, first those `needed`, then from each class in turn; sorts by class."""
    labels = np.asarray(labels)
    chosen = np.fromiter(dict.fromkeys(int(i) for i in needed), np.int64)[:count]
    if len(chosen) < count:
        order = np.random.default_rng(0).permutation(len(labels))
        order = order[~np.isin(order, chosen)]
        others = in_turn(order, labels)
        chosen = np.concatenate([chosen, others[: count - len(chosen)]])
    return chosen[np.lexsort((chosen, labels[chosen]))]


def cover(image: np.ndarray, side: int) -> np.ndarray:
    """Returns the middle square of a uint8 image `[h w c]` as `[side side 3]`."""
    picture = to_pil(image).convert("RGB")
    edge = min(picture.size)
    left, top = (picture.width - edge) // 2, (picture.height - edge) // 2
    # Small images are magnified pixel by pixel, as a whole multiple would be.
    resample = Image.Resampling.NEAREST if edge <= side // 2 else Image.Resampling.BILINEAR
    box = (left, top, left + edge, top + edge)
    return np.asarray(picture.resize((side, side), resample, box=box, reducing_gap=2.0))


def make(
    read_fn: Callable[[int], np.ndarray],
    labels: np.ndarray,
    *,
    needed: Sequence[int] = (),
    where: np.ndarray | None = None,
) -> Sprites:
    """Makes thumbnails of the items that `where` marks, up to the limit of `thumbnail_size`.

    `read_fn(item) -> uint8 [h w c]`. An unreadable image gets no thumbnail.
    """
    n = len(labels)
    available = np.arange(n) if where is None else np.flatnonzero(where)
    count, side, quality = thumbnail_size(len(available))
    place = np.full(n, -1)
    place[available] = np.arange(len(available))
    wanted = [int(place[i]) for i in needed if place[i] >= 0]
    chosen = available[choose(np.asarray(labels)[available], wanted, count)]
    cells = np.full(n, MISSING, np.uint16)
    pending: list[Future[bytes]] = []
    rows: list[int] = []
    filled, sheet = 0, np.zeros((CELLS * side, CELLS * side, 3), np.uint8)
    with ThreadPoolExecutor(machine.core_count()) as encoders:  # WebP takes most of the time
        for item in chosen:
            try:
                picture = cover(read_fn(int(item)), side)
            except (UnreadableImage, OSError):
                continue
            place_in_sheet = filled % CELLS**2
            top, left = divmod(place_in_sheet, CELLS)
            sheet[top * side : (top + 1) * side, left * side : (left + 1) * side] = picture
            cells[item] = filled
            filled += 1
            if filled % CELLS**2 == 0:
                pending.append(encoders.submit(_encoded, sheet, quality))
                rows.append(CELLS)
                sheet = np.zeros_like(sheet)
        if filled % CELLS**2:
            rows.append(-(-(filled % CELLS**2) // CELLS))
            pending.append(encoders.submit(_encoded, sheet[: rows[-1] * side], quality))
        sheets = [future.result() for future in pending]
    return Sprites(sheets, rows, cells)


def _encoded(sheet: np.ndarray, quality: int) -> bytes:
    return file_bytes(Image.fromarray(sheet), "WEBP", quality=quality, method=4)
