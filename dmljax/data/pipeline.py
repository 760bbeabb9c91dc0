"""From a split to host batches of numpy arrays, the same whatever the workers and hosts.

A training batch is `dict(images, labels, indices)`: `uint8 [b h w c]`, `int32 [b]`, and the rows of
the split, `int64 [b]`. An evaluation batch has `where [b]` besides, False on the padding of the
last one. `b` is this host's share of the global batch: a contiguous block of its rows.

Nothing here knows devices. Batches are made ahead in the background; putting the next one on the
device while this one is used is the train loop's part.
"""

from __future__ import annotations

import collections
import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from absl import flags, logging

from dmljax.data import decode, sampling, transforms
from dmljax.data.splits import Split, record_name

__all__ = ["Batches", "Reader", "TrainRow", "batch_of", "evaluation", "train"]

_SampleFn = Callable[..., np.ndarray]
_TransformFn = Callable[[np.ndarray, np.random.Generator], np.ndarray]
_FOREVER = 1 << 40  # steps; grain wants a length
_POLICIES = ("raise", "skip")


class Batches:
    """An iterator of batches. `close()` (or leaving a `with`) ends its threads and processes.

    `skipped` counts, by name, the images that could not be read under `unreadable='skip'`.
    """

    def __init__(self, iterator, name_fn: Callable[[int], str]):
        self._iterator, self._name_fn = iterator, name_fn
        self.skipped: collections.Counter[str] = collections.Counter()

    def __iter__(self):
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        if self._iterator is None:
            raise StopIteration
        batch = next(self._iterator)
        for i in batch.pop("skipped").tolist():
            if i >= 0:
                name = self._name_fn(i)
                if name not in self.skipped:
                    logging.warning("%s cannot be read: skipped from now on", name)
                self.skipped[name] += 1
        return batch

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self) -> None:
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            iterator.close()


class Reader:
    """Row `i` of a split as pixels, cut to its box; decoded once with `cache`.

    The cache is filled as images are met, in each process on its own.
    """

    def __init__(self, split: Split, cache: bool | dict[int, np.ndarray]):
        self.split = split
        self._cache = cache if isinstance(cache, dict) else {} if cache else None

    def __call__(self, i: int) -> np.ndarray:
        if self._cache is not None and (image := self._cache.get(i)) is not None:
            return image
        try:
            image = decode.read(self.split.records[i])
            if self.split.boxes is not None:
                left, top, right, bottom = self.split.boxes[i].tolist()
                if right > image.shape[1] or bottom > image.shape[0]:
                    raise decode.UnreadableImage(
                        f"the box {left} {top} {right} {bottom} is outside of the "
                        f"{image.shape[1]}x{image.shape[0]} image"
                    )
                image = image[top:bottom, left:right]
        except decode.UnreadableImage as error:
            name = record_name(self.split.records, i)
            raise decode.UnreadableImage(
                f"{name} cannot be read: {error}. Replace it, or set unreadable='skip'"
            ) from error
        if self._cache is not None:
            self._cache[i] = image
        return image

    def at_once(self, rows: np.ndarray) -> np.ndarray | None:
        """The pixels of rows that are held as one array; None where each has to be read."""
        records = self.split.records
        held = isinstance(records, np.ndarray) and records.ndim == 4 and self.split.boxes is None
        return records[rows] if held else None

    def __getstate__(self):
        return self.split, None if self._cache is None else {}

    def __setstate__(self, state):
        self.split, self._cache = state


class _Keyed(threading.local):
    """Philox generators, one a thread: what a key gives is what a new one of that key gives."""

    def __init__(self):
        self._bits = np.random.Philox(key=[0, 0])
        self._rng, self._begun = np.random.Generator(self._bits), self._bits.state

    def __call__(self, *key: int) -> np.random.Generator:
        self._begun["state"]["key"][:] = key
        self._bits.state = self._begun  # ten times as fast as a new one
        return self._rng


_keyed = _Keyed()


class TrainRow:
    """(step, row of a host's share) -> image. All randomness is keyed by (seed, position).

    A transform with an attribute `stacked`, such as `transforms.distort`, sees the batch as a whole
    in `finish`: `stacked(images, rngs)` is the transform of each image with its generator. Images
    in memory are then `whole` from the start: a call for each costs as much as its distortion.
    """

    def __init__(self, reader, sample_fn, transform_fn, *, seed, size, offset, skip):
        self._reader, self._sample_fn, self._transform_fn = reader, sample_fn, transform_fn
        function = getattr(transform_fn, "func", transform_fn)  # of a functools.partial
        if stacked := getattr(function, "stacked", None):
            self._stacked = functools.partial(stacked, **getattr(transform_fn, "keywords", {}))
            self._transform_fn = transforms.unchanged
        else:
            self._stacked = None
        self._seed, self._size, self._offset, self._skip = seed, size, offset, skip
        self._groups = sampling.group(reader.split.labels)
        self._start()

    def _start(self):
        self._plan = functools.lru_cache(64)(
            functools.partial(self._sample_fn, self._groups, seed=self._seed)
        )

    def __getstate__(self):
        return {k: v for k, v in self.__dict__.items() if k != "_plan"}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self._start()

    def __call__(self, step: int, row: int) -> dict[str, Any]:
        rng = self._rng(step, row) if self._stacked is None else None
        i = int(self._plan(step=step)[self._offset + row])
        label, skipped = self._reader.split.labels[i], -1
        try:
            image = self._reader(i)
        except decode.UnreadableImage:
            if not self._skip:
                raise
            skipped = i
            i, image = self._next_of_class(i, label)
        return {
            "images": np.ascontiguousarray(self._transform_fn(image, rng)),
            "labels": label,
            "indices": np.int64(i),
            "skipped": np.int64(skipped),
        }

    def whole(self, step: int, size: int) -> dict[str, np.ndarray] | None:
        """Rows 0 to `size` of a step, before `finish`; None where they come one by one."""
        if self._stacked is None:
            return None
        stop = self._offset + size
        rows = np.array(self._plan(step=step)[self._offset : stop], np.int64)
        images = self._reader.at_once(rows)
        if images is None:
            return None
        if len(rows) < size:
            raise IndexError(f"the sampler gave fewer than {stop} rows at step {step}")
        labels, skipped = self._reader.split.labels[rows], np.full(len(rows), -1)
        return {"images": images, "labels": labels, "indices": rows, "skipped": skipped}

    def finish(self, batch: dict[str, np.ndarray], step: int) -> dict[str, np.ndarray]:
        if self._stacked is None:
            return batch
        rngs = (self._rng(step, row) for row in range(len(batch["labels"])))
        return {**batch, "images": self._stacked(batch["images"], rngs)}

    def _rng(self, step: int, row: int) -> np.random.Generator:
        return _keyed(self._seed, step * self._size + self._offset + row)

    def _next_of_class(self, i: int, label: int) -> tuple[int, np.ndarray]:
        """A readable image of the same class, so that the batch keeps its structure."""
        mates = np.flatnonzero(self._reader.split.labels == label)
        for mate in np.roll(mates, -np.searchsorted(mates, i, side="right")).tolist()[:-1]:
            try:
                return mate, self._reader(mate)
            except decode.UnreadableImage:
                continue
        name = self._reader.split.names[label]
        raise decode.UnreadableImage(f"no image of class {name!r} can be read: remove the class")


class _EvaluationRow:
    """(batch, row of a host's share) of the padded split in order -> image; padding is black and
    not counted.
    """

    def __init__(self, reader, transform_fn, shape, *, size, offset, skip):
        self._reader, self._transform_fn, self._shape = reader, transform_fn, shape
        self._size, self._offset, self._skip = size, offset, skip

    def whole(self, batch: int, size: int) -> None:
        return None

    def finish(self, batch: dict[str, np.ndarray], step: int) -> dict[str, np.ndarray]:
        return batch

    def __call__(self, batch: int, row: int) -> dict[str, Any]:
        i = batch * self._size + self._offset + row
        image, label, where, skipped = np.zeros(self._shape, np.uint8), np.int32(0), False, -1
        if i < len(self._reader.split):
            label = self._reader.split.labels[i]
            try:
                image = np.ascontiguousarray(self._transform_fn(self._reader(i), _keyed(0, i)))
                where = True
            except decode.UnreadableImage:
                if not self._skip:
                    raise
                skipped = i
        return {
            "images": image,
            "labels": label,
            "indices": np.int64(i if i < len(self._reader.split) else -1),
            "where": np.bool_(where),
            "skipped": np.int64(skipped),
        }


def train(
    split: Split,
    *,
    sample_fn: _SampleFn,
    transform_fn: _TransformFn,
    seed: int,
    start: int = 0,
    host: int = 0,
    hosts: int = 1,
    threads: int | None = None,
    workers: int = 0,
    cache: bool = False,
    unreadable: str = "raise",
) -> Batches:
    """Endless training batches from step `start` on, which costs the same for any `start`.

    `sample_fn(labels, *, seed, step) -> indices` plans the global batch, for instance
    `functools.partial(sampling.plan, classes=32, per_class=4)`; its labels are those of
    `sampling.group`, sorted once. `threads` decode ahead (by default
    one a core, at least four), in this process or in each of `workers` processes; these pay on
    hosts with many cores only. `cache=True` keeps decoded images in memory. `unreadable='skip'`
    takes the next readable image of the class instead, and counts.
    """
    _check(split, host, hosts, unreadable, workers)
    groups = sampling.group(split.labels)
    size = len(sample_fn(groups, seed=seed, step=start))
    local = _share(size, hosts)
    _report(split, groups, sample_fn, size)
    reader = Reader(split, cache)
    row = TrainRow(
        reader,
        sample_fn,
        transform_fn,
        seed=seed,
        size=size,
        offset=host * local,
        skip=unreadable == "skip",
    )
    return _batches(row, local, start, _FOREVER, threads, workers, split)


def evaluation(
    split: Split,
    *,
    transform_fn: _TransformFn,
    batch_size: int,
    host: int = 0,
    hosts: int = 1,
    threads: int | None = None,
    workers: int = 0,
    cache: bool | dict[int, np.ndarray] = False,
    unreadable: str = "raise",
) -> Batches:
    """Every image once, in order, in batches of one size; `where` is False on what is padding.

    `batch_size` is that of all hosts together. Under `unreadable='skip'` an image that cannot be
    read is black, counted, and False in `where`. A dict as `cache` is filled, and used again.
    """
    _check(split, host, hosts, unreadable, workers)
    local = _share(batch_size, hosts)
    reader = Reader(split, cache)
    skip = unreadable == "skip"
    shape = image_shape(reader, transform_fn, skip=skip)
    row = _EvaluationRow(
        reader, transform_fn, shape, size=batch_size, offset=host * local, skip=skip
    )
    return _batches(row, local, 0, -(-len(split) // batch_size), threads, workers, split)


def _check(split: Split, host: int, hosts: int, unreadable: str, workers: int) -> None:
    if not len(split):
        raise ValueError("the split is empty: there is nothing to read")
    if unreadable not in _POLICIES:
        raise ValueError(f"unreadable must be 'raise' or 'skip', not {unreadable!r}")
    if not 0 <= host < hosts:
        raise ValueError(f"host {host} of {hosts} does not exist")
    if workers < 0:
        raise ValueError(f"workers must be 0 or more, not {workers}")


def _share(size: int, hosts: int) -> int:
    if size < 1 or size % hosts:
        raise ValueError(f"a global batch of {size} cannot be shared by {hosts} hosts evenly")
    return size // hosts


def image_shape(reader: Reader, transform_fn: _TransformFn, *, skip: bool) -> tuple[int, ...]:
    """Of one transformed image, the first that can be read if `skip`."""
    for i in range(len(reader.split)):
        try:
            image = reader(i)
        except decode.UnreadableImage:
            if skip:
                continue
            raise
        return transform_fn(image, _keyed(0, i)).shape
    raise decode.UnreadableImage("not one image of the split can be read")


def _report(split: Split, groups: sampling.Groups, sample_fn: _SampleFn, size: int) -> None:
    single = int((groups.count == 1).sum())
    if single:
        name = split.names[int(split.labels[groups.images(int(np.argmin(groups.count)))[0]])]
        logging.warning("%d classes have one image, so no positive, such as %r", single, name)
    function = getattr(sample_fn, "func", sample_fn)
    keywords = getattr(sample_fn, "keywords", {})
    if function is sampling.plan:
        steps = sampling.coverage(groups, **keywords)
        logging.info("batches of %d: every image in %d steps", size, steps)


def _batches(row, local: int, start: int, stop: int, threads, workers: int, split) -> Batches:
    """Batches by grain, whose elements are whole batches: rows that became batches after
    `to_iter_dataset` would come from the strides of its workers, and P x K batches would lose their
    structure; a call of grain for each row costs as much as the row of a small image.
    """
    # grain imports jax, which this room must not do at import time.
    import grain

    threads = threads or max(os.cpu_count() or 1, 4)
    if threads < 1:
        raise ValueError(f"threads must be 1 or more, not {threads}")
    batches = grain.MapDataset.range(start, stop).map(functools.partial(batch_of, row, local))
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=threads)
    dataset = batches.to_iter_dataset(options)
    if workers:
        if not flags.FLAGS.is_parsed():  # grain asks absl's flags, which a notebook never parses
            flags.FLAGS.mark_as_parsed()
        processes = grain.multiprocessing.MultiprocessingOptions(num_workers=workers)
        dataset = dataset.mp_prefetch(processes, worker_init_fn=_follow_parent)
    name_fn = functools.partial(record_name, split.records)
    return Batches(iter(dataset), name_fn)


def batch_of(row_fn: TrainRow | _EvaluationRow, size: int, step: int) -> dict[str, np.ndarray]:
    """Rows 0 to size of a step, stacked and finished."""
    step = int(step)
    batch = row_fn.whole(step, size)
    if batch is not None:
        return row_fn.finish(batch, step)
    rows = [row_fn(step, i) for i in range(size)]
    shapes = {row["images"].shape for row in rows}
    if len(shapes) > 1:
        raise ValueError(
            f"images of one batch have the shapes {sorted(shapes)[:3]}: name a transform that "
            "makes them one size, such as standard_train"
        )
    return row_fn.finish({key: np.stack([row[key] for row in rows]) for key in rows[0]}, step)


def _follow_parent(worker: int, workers: int) -> None:
    """Ends a worker when its parent is gone, however it went; otherwise it would live for ever.

    Signals are the parent's affair: Ctrl-C and Slurm send them to workers too, while the parent
    still needs batches to finish its step.
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
