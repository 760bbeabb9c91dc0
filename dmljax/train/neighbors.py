"""Searches the classes that are most alike, for samplers that take `neighbors`."""

import functools
import pathlib
from collections.abc import Callable

import jax
import numpy as np

from dmljax import retrieval
from dmljax.files.writing import write_array
from dmljax.train.evaluation import MAIN, Evaluator
from dmljax.train.run import Run
from dmljax.train.step import TrainState

_FOLDER = "neighbors"
_COUNT = 32  # neighbors that are kept of each class
_ROWS = 4096  # embeddings that are summed at a time


def nearest_of_each_class(
    embeddings: np.ndarray, labels: np.ndarray, *, count: int = _COUNT
) -> np.ndarray:
    """Returns `[C n]`: the classes with the nearest centers to each class, nearest first.

    Classes are indices into the sorted labels. A center is the mean of a class's embeddings. Rows
    that are NaN (unreadable images) do not count. n is at most `count` and C - 1.
    """
    names, classes = np.unique(labels, return_inverse=True)
    if len(names) == 1:
        return np.zeros((1, 0), np.int32)
    sums, counts = np.zeros((len(names), embeddings.shape[1])), np.zeros(len(names), int)
    for start in range(0, len(labels), _ROWS):  # a copy of all rows would take as much as they do
        rows = embeddings[start : start + _ROWS]
        readable = np.isfinite(rows).all(axis=1)
        of_rows = classes[start : start + _ROWS][readable]
        np.add.at(sums, of_rows, rows[readable])
        np.add.at(counts, of_rows, 1)
    centers = (sums / np.maximum(counts, 1)[:, None]).astype(np.float32)
    nearest, _ = retrieval.nearest(centers, k=min(count, len(names) - 1))
    return nearest.astype(np.int32)


def refresh(
    run: Run, state: TrainState, evaluator: Evaluator, workdir: pathlib.Path
) -> Callable[..., np.ndarray]:
    """Searches the neighbors by the current embeddings, and returns the sampler with them.

    They are also kept in the run folder, for a run that is resumed before the next search.
    """
    embeddings = evaluator.embeddings(state, run.train)[MAIN]
    table = nearest_of_each_class(embeddings, run.train.labels)
    if jax.process_index() == 0:
        path = _path(workdir, int(state.step))
        path.parent.mkdir(exist_ok=True)
        write_array(path, table)
    return functools.partial(run.sample_fn, neighbors=table)


def sample_fn_at(run: Run, workdir: pathlib.Path | None, step: int) -> Callable[..., np.ndarray]:
    """Returns the sampler after `step`, with the neighbors of the last search before it."""
    searched = max((s for s in run.neighbor_steps if s < step), default=None)
    if searched is None:
        return run.sample_fn
    assert workdir is not None  # the run is resumed
    path = _path(workdir, searched)
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is missing, so the run cannot continue with the same batches: restore the "
            "file, or start the run in a new folder"
        )
    return functools.partial(run.sample_fn, neighbors=np.load(path))


def remove_old(run: Run, workdir: pathlib.Path, oldest: int) -> None:
    """Removes tables that no run needs that continues at step `oldest` or later."""
    needed = max((s for s in run.neighbor_steps if s < oldest), default=0)
    for path in (workdir / _FOLDER).glob("*.npy"):
        if int(path.stem) < needed:
            path.unlink()


def _path(workdir: pathlib.Path, step: int) -> pathlib.Path:
    return workdir / _FOLDER / f"{step}.npy"
