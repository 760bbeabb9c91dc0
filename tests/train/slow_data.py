"""A data set in which each image takes a moment to read while a file `slow` exists beside it."""

import pathlib
import time

import numpy as np

from dmljax.data.splits import Split, divide


class Records:
    """Pixels, read one by one."""

    def __init__(self, images, flag):
        self._images, self._flag = images, flag

    def __len__(self):
        return len(self._images)

    def __getitem__(self, index):
        if self._flag.exists():
            time.sleep(0.2)
        return self._images[index]


def blobs(*, path):
    """The images of an npz, as `system.blobs` writes it, in two halves of the classes."""
    with np.load(path) as arrays:
        images, labels = arrays["images"], arrays["labels"]
    records = Records(images, pathlib.Path(path).with_name("slow"))
    names = tuple(f"class {c}" for c in range(labels.max() + 1))
    return divide(Split(records, labels, names), train=0.5)
