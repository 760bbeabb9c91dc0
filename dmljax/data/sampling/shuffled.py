"""Batches drawn without regard to class."""

import numpy as np

from dmljax.data.sampling import draws
from dmljax.data.sampling.groups import Labels, group


def uniform(labels: Labels, *, batch_size: int, seed: int, step: int) -> np.ndarray:
    """`batch_size` images of a shuffled epoch.

    A batch may contain the end of one epoch and the start of the next, so that no image is skipped.
    """
    n = len(group(labels).labels)
    if not 1 <= batch_size <= n:
        raise ValueError(
            f"uniform: batch_size is {batch_size}, but the training split has {n} images: set "
            f"--config.sampler.batch_size={n} or less"
        )
    positions = step * batch_size + np.arange(batch_size, dtype=np.int64)
    epochs, offsets = positions // n, positions % n
    return np.concatenate(
        [
            draws.permutation(n, seed, draws.UNIFORM, int(epoch))[offsets[epochs == epoch]]
            for epoch in np.unique(epochs)
        ]
    )
