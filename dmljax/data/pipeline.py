"""From a split to batches of numpy arrays, which do not depend on the number of workers and hosts.

A training batch is `dict(images, labels)`: `uint8 [b h w c]` and `int32 [b]`. An evaluation batch
is `dict(images, indices, where)`: `indices [b]` are the rows of the split (-1 for padding), and
`where [b]` is False for padding and for unreadable images. `b` is one host's share of the global
batch, a contiguous block of its rows. All hosts have shares of one size: where the hosts (or their
devices: `padded`) do not divide the batch, rows of zeros follow its last row.

Batches are made ahead in the background. This module knows no devices: the train loop sends the
next batch to the devices while they compute the current one.
"""

from __future__ import annotations

import collections
import functools
import os
import pathlib
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from absl import flags, logging

from dmljax.data import sampling
from dmljax.data.batches import EvaluationBatch, PlannedBatch, TrainBatch
from dmljax.data.records import ArrayRecords, Reader
from dmljax.data.splits import Split, record_name
from dmljax.data.transforms import transform as transform_lib
from dmljax.files import machine
from dmljax.hints import counted

_TransformFn = transform_lib.Transform | Callable[[np.ndarray, np.random.Generator], np.ndarray]
# Training and evaluation may read the same image, and each counts what it skips.
_warn_once = functools.cache(logging.warning)
_MANY_CORES = 8
_SHARED_MEMORY = "/dev/shm"  # through which processes send batches; a container has 64 MB of it
_SHARED_BYTES = 512 << 20  # of a process: three batches of 256 photographs take a quarter
_ENDLESS = 1 << 40  # steps, because grain needs a length


class Batches:
    """An iterator of batches. `close()`, or the end of a `with` block, ends its workers.

    `skipped` counts, by name, the images that could not be read with `unreadable='skip'`.
    """

    def __init__(
        self,
        iterator: Any,
        split: Split,
        skipped: collections.Counter[str] | None = None,
    ):
        self._iterator, self._split = iterator, split  # an iterator of grain, with `close`
        self.skipped = collections.Counter() if skipped is None else skipped

    def __iter__(self):
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        if self._iterator is None:
            raise StopIteration
        try:
            batch = next(self._iterator)
        except RuntimeError as error:
            if "exit code -7" not in str(error):  # SIGBUS
                raise
            raise OSError(
                f"{_SHARED_MEMORY} is full, through which processes send the images that they "
                "read: enlarge it (docker run --shm-size=8g), or set runtime.workers=0"
            ) from error
        for i in batch.pop("skipped").tolist():
            if i >= 0:
                name = record_name(self._split.records, i)
                if name not in self.skipped:
                    _warn_once("%s cannot be read: skipped from now on", name)
                self.skipped[name] += 1
        return batch

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def replace(self, other: Batches) -> None:
        """Goes on with the batches of `other`; those made ahead until now are dropped."""
        self.close()
        self._iterator, other._iterator = other._iterator, None

    def close(self) -> None:
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            iterator.close()


def train(
    split: Split,
    *,
    sample_fn: Callable[..., np.ndarray],
    transform_fn: _TransformFn,
    seed: int,
    start: int = 0,
    host: int = 0,
    hosts: int = 1,
    padded: int | None = None,
    threads: int | None = None,
    workers: int = 0,
    cache: bool = False,
    unreadable: str = "raise",
    shapes: Sequence[tuple[int, ...]] | None = None,
    sources: np.ndarray | None = None,
) -> Batches:
    """Yields training batches without end. To start at a later step takes no extra time.

    `sample_fn(groups, *, seed, step) -> indices` plans the global batch, for instance
    `functools.partial(sampling.class_balanced, classes=32, per_class=4)`; `groups` is
    `sampling.group(split.labels)`. `padded` is the number of rows, with rows of zeros at the end,
    that all hosts have together (by default as few as they can share). `threads` (by default one
    per core, and at least four, or two in each of several processes) decode ahead, in this process
    or in `workers` processes (`workers_for`). `cache=True` keeps decoded images in memory.
    With `unreadable='skip'`, the next readable image of the class replaces an image that cannot be
    read; if the class has none, one of another class, with its label. `Batches.skipped` counts
    such images.

    With `shapes` and `sources` of `batches.PlannedBatch`, batches have no pixels, for devices that
    hold the images; no image is read.
    """
    groups = _groups(split)
    transform = transform_lib.bind(transform_fn)
    size = len(sample_fn(groups, seed=seed, step=start))
    share = _share(size, host, hosts, padded, unreadable)
    share |= {"transform": transform, "sample_fn": sample_fn, "seed": seed}
    batch_fn: Callable[[int], dict[str, np.ndarray]]
    if shapes is None or sources is None:
        batch_fn = TrainBatch(reader=Reader(split, cache, least_side=transform.least_side), **share)
    else:
        del share["skip"]
        batch_fn = PlannedBatch(shapes=shapes, sources=sources, labels=split.labels, **share)
    iterator = _in_background(batch_fn, start, _ENDLESS, threads, workers)
    return Batches(iterator, split)


def evaluation(
    split: Split,
    *,
    transform_fn: _TransformFn,
    batch_size: int,
    host: int = 0,
    hosts: int = 1,
    padded: int | None = None,
    threads: int | None = None,
    workers: int = 0,
    cache: bool | dict[int, np.ndarray] = False,
    unreadable: str = "raise",
    skipped: collections.Counter[str] | None = None,
    rows: range | None = None,
) -> Batches:
    """Yields every image once, in order, in batches of one size; with `rows`, only these.

    `batch_size` counts the rows of all hosts together, and `padded` also counts rows of padding. A
    dict as `cache` is filled, and can be used again. With `unreadable='skip'`, an image that cannot
    be read is black, and False in `where`. Such images are counted in `skipped`; a name that it
    already contains is not logged again.
    """
    _check_not_empty(split)
    rows = range(len(split)) if rows is None else rows
    transform = transform_lib.bind(transform_fn)
    batch_fn = EvaluationBatch(
        reader=Reader(split, cache, least_side=transform.least_side),
        transform=transform,
        rows=rows,
        **_share(batch_size, host, hosts, padded, unreadable),
    )
    iterator = _in_background(batch_fn, 0, -(-len(rows) // batch_size), threads, workers)
    return Batches(iterator, split, skipped)


def workers_for(split: Split) -> int:
    """Returns how many processes decode images fast enough for an accelerator.

    Threads of one process hand Python's lock to each other several times for each image, so that 16
    threads are as slow as four: on 16 cores, 8 processes decoded 3,301 JPEGs a second, and 16
    threads 673. Images in memory stay in this process: every other process would need a copy.
    """
    records = getattr(split.records, "records", split.records)  # a subset keeps all of them
    are_files = isinstance(records, ArrayRecords) or (
        isinstance(records, list | tuple)
        and isinstance(next(iter(records), None), str | os.PathLike)
    )
    count = machine.core_count()
    if count < _MANY_CORES or not are_files or not _may_start_processes():
        return 0
    return min(count // 2, shutil.disk_usage(_SHARED_MEMORY).free // _SHARED_BYTES)


def _may_start_processes() -> bool:
    """Tells whether the main module is the command `dmljax` or a notebook.

    A new process runs the main module again, which the script of a user may not expect.
    """
    main = sys.modules["__main__"]
    spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if path is None:  # a notebook
        is_safe = True
    else:  # the command, by `python -m` or by its script
        is_safe = spec.name.startswith("dmljax.") if spec else pathlib.Path(path).stem == "dmljax"
    return is_safe and os.path.isdir(_SHARED_MEMORY)


def _check_not_empty(split: Split) -> None:
    if not len(split):
        raise ValueError("the split is empty: there is nothing to read")


def _groups(split: Split) -> sampling.Groups:
    """Groups images by class, and warns about classes with one image."""
    _check_not_empty(split)
    groups = sampling.group(split.labels)
    if single := int((groups.count == 1).sum()):
        name = split.names[int(split.labels[groups.images(int(np.argmin(groups.count)))[0]])]
        classes = f"{counted(single, 'class')} {'has' if single == 1 else 'have'}"
        logging.warning("%s one image, so no positive, such as %r", classes, name)
    return groups


def _share(
    batch_size: int, host: int, hosts: int, padded: int | None, unreadable: str
) -> dict[str, Any]:
    """Returns the rows of a host, as `batches` takes them; the last ones may be padding."""
    padded = -(-batch_size // max(hosts, 1)) * hosts if padded is None else padded
    problem = ""
    if batch_size < 1:
        problem = f"batch_size must be 1 or more, not {batch_size}"
    elif unreadable not in ("raise", "skip"):
        problem = f"unreadable must be 'raise' or 'skip', not {unreadable!r}"
    elif not 0 <= host < hosts:
        problem = f"host {host} of {hosts} does not exist"
    elif padded < batch_size or padded % hosts:
        problem = (
            f"{padded} rows of a batch of {batch_size} cannot be divided evenly by {hosts} hosts, "
            "which must all have the same number of devices"
        )
    if problem:
        raise ValueError(problem)
    size, skip = padded // hosts, unreadable == "skip"
    return {"size": size, "offset": host * size, "global_size": batch_size, "skip": skip}


def _in_background(
    batch_fn: Callable[[int], dict[str, np.ndarray]],
    start: int,
    stop: int,
    threads: int | None,
    workers: int,
) -> Any:
    """Computes `batch_fn(step)` of the steps `start` to `stop` ahead, in order, by grain.

    The elements of grain's data set are complete batches. If they were rows, each worker would
    build its own batches of rows, which would destroy their P x K structure.
    """
    # grain imports jax, which worker processes and light tools must not load.
    import grain

    threads = threads or max(machine.core_count() // max(workers, 1), 2 if workers else 4)
    for name, value, least in (("workers", workers, 0), ("threads", threads, 1)):
        if value < least:
            raise ValueError(f"{name} must be {least} or more, not {value}")
    batches = grain.MapDataset.range(start, stop).map(batch_fn)
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=threads)
    dataset = batches.to_iter_dataset(options)
    if workers:
        if not flags.FLAGS.is_parsed():  # grain reads absl's flags, which a notebook never parses
            flags.FLAGS.mark_as_parsed()
        processes = grain.multiprocessing.MultiprocessingOptions(num_workers=workers)
        dataset = dataset.mp_prefetch(processes, worker_init_fn=_end_with_parent)
    return iter(dataset)


def _end_with_parent(worker: int, workers: int) -> None:
    """Ends a worker process when its parent has ended in any way; otherwise it would never end.

    Workers ignore Ctrl-C and Slurm's signals, which they receive too, because the parent still
    needs batches to finish its step.
    """
    parent = os.getppid()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def watch():
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
