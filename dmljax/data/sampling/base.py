"""The images of each class, sorted once for all steps, and the random draws of the samplers."""

import dataclasses
import functools

import numpy as np

# One number per purpose, so that no two draws use the same generator.
ROUND, CLASS_ORDER, UNIFORM, CHUNKS, CLASS_COUNT, N_PAIRS, ABE_PAIRS, OMITTED, NEAREST = range(9)


def generator(*key: int) -> np.random.Generator:
    """Returns a generator seeded by integers such as (seed, purpose, step)."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


@functools.lru_cache(8192)
def permutation(n: int, *key: int) -> np.ndarray:
    """Draws an order of 0 to n - 1. Cached, since consecutive steps use the same orders."""
    order = generator(*key).permutation(n)
    order.setflags(write=False)
    return order


@dataclasses.dataclass(frozen=True, eq=False)
class Groups:
    """Images sorted by class: `order[start[c] : start[c] + count[c]]` are the images of class c."""

    labels: np.ndarray
    order: np.ndarray
    start: np.ndarray
    count: np.ndarray

    def images(self, c: int) -> np.ndarray:
        """Returns the indices of the images of class `c`."""
        return self.order[self.start[c] : self.start[c] + self.count[c]]


Labels = np.ndarray | Groups


def group(labels: Labels) -> Groups:
    """Groups images by class. Classes are the distinct labels in ascending order."""
    if isinstance(labels, Groups):
        return labels
    labels = np.asarray(labels)
    if labels.ndim != 1 or not len(labels) or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(
            f"labels must be integers of shape [n] with n > 0, not {labels.dtype} {labels.shape}"
        )
    order = np.argsort(labels, kind="stable")
    _, start, count = np.unique(labels[order], return_index=True, return_counts=True)
    return Groups(labels, order, start, count)


def check_batch(groups: Groups, classes: int, per_class: int) -> None:
    """Raises if `classes` x `per_class` images cannot be drawn, and names the flag to set."""
    total, problem = len(groups.count), ""
    if classes < 1 or per_class < 1:
        problem = (
            f"a batch of {classes} classes x {per_class} images is empty: "
            "--config.sampler.classes and --config.sampler.per_class must be 1 or more"
        )
    elif classes > total:
        problem = (
            f"the sampler needs {classes} classes, but the training split has only {total}: set "
            f"--config.sampler.classes={total}"
        )
    elif classes * per_class > len(groups.order):
        problem = (
            f"a batch of {classes} x {per_class} = {classes * per_class} images is larger than the "
            f"training split of {len(groups.order)}: set --config.sampler.per_class="
            f"{len(groups.order) // classes}"
        )
    if problem:
        raise ValueError(problem)
