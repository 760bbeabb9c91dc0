"""Reads images of a split by index."""

import numpy as np

from dmljax.data import decode
from dmljax.data.splits import Split, record_name


class Reader:
    """`reader(i)` returns image `i` of a split as `uint8 [h w c]`, cut to its box.

    With `cache`, each image is decoded once per process. `cache` may be a dict to be filled, which
    readers of one split with one `least_side` can share.

    `least_side` is as in `decode.decode`. Images that are cut to boxes are decoded in full.
    """

    def __init__(
        self,
        split: Split,
        cache: bool | dict[int, np.ndarray] = False,
        *,
        least_side: int | None = None,
    ):
        self.split = split
        self._least_side = None if split.boxes is not None else least_side
        self._cache: dict[int, np.ndarray] | None = None
        if cache is not False:
            self._cache = cache if isinstance(cache, dict) else {}

    def __call__(self, i: int, record: bytes | None = None) -> np.ndarray:
        """Image `i`; `record` is its content if the caller has read it already."""
        if self._cache is not None and (image := self._cache.get(i)) is not None:
            return image
        try:
            record = self.split.records[i] if record is None else record
            image = decode.read(record, least_side=self._least_side)
            if self.split.boxes is not None:
                left, top, right, bottom = self.split.boxes[i].tolist()
                if right > image.shape[1] or bottom > image.shape[0]:
                    raise decode.UnreadableImage(
                        f"the box {left} {top} {right} {bottom} exceeds the "
                        f"{image.shape[1]}x{image.shape[0]} image"
                    )
                image = image[top:bottom, left:right]
        except decode.UnreadableImage as error:
            name = record_name(self.split.records, i)
            raise decode.UnreadableImage(
                f"{name} cannot be read: {error}. Replace it, or set unreadable='skip' "
                "(--config.unreadable=skip)"
            ) from error
        if self._cache is not None:
            self._cache[i] = image
        return image

    def stack(self, indices: np.ndarray) -> np.ndarray | None:
        """The images at `indices`, if the split is one array in memory; otherwise None."""
        records = self.split.records
        if isinstance(records, np.ndarray) and records.ndim == 4 and self.split.boxes is None:
            return records[indices]
        return None

    def __getstate__(self):
        # A worker process starts with an empty cache.
        return self.split, None if self._cache is None else {}, self._least_side

    def __setstate__(self, state):
        self.split, self._cache, self._least_side = state
