"""Applies a function to every image of a split; keeps the features of a frozen backbone on disk.

`data.features.Cache` is filled with files of some hundred rows, each written completely or not at
all. A killed process continues with the first file that does not exist.
"""

import collections
import functools
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from dmljax.data import pipeline
from dmljax.data.features import Cache, Entry
from dmljax.data.splits import Split, images_of
from dmljax.data.transforms.transform import Transform
from dmljax.files import parts, reading
from dmljax.files.writing import write_array
from dmljax.hints import Progress
from dmljax.methods.assemble import backbone_features
from dmljax.train import devices, hosts
from dmljax.train.devices import Shardings, on_every_device, prefetch, requested_ahead
from dmljax.train.interrupts import Interrupts
from dmljax.train.run import Run
from dmljax.train.step import TrainState

_FILE_ROWS = 256
_LEAST_TIMED = 64  # images; fewer may have been read while the first batch was compiled
_OPTION = "--config.runtime.features"


def embed(embed_fn: Callable[..., Any], split: Split, **options: Any) -> Any:
    """Returns `embed_fn(images)` of every image of a split, in order, as float32 numpy arrays.

    `options` as for `embedded_batches`. Rows of images that cannot be read are NaN.
    """
    results = None
    for outputs, where, rows in embedded_batches(embed_fn, split, **options):
        if results is None:
            results = jax.tree.map(
                lambda x: np.full((len(split), *x.shape[1:]), np.nan, np.float32), outputs
            )
        pairs = zip(jax.tree.leaves(results), jax.tree.leaves(outputs), strict=True)
        for result, output in pairs:
            result[rows[where]] = output[where]
    return results


def embedded_batches(
    embed_fn: Callable[..., Any],
    split: Split,
    *,
    transform_fn: Transform | Callable,
    batch_size: int,
    shards: Shardings,
    rows: range | None = None,
    cache: bool | dict[int, np.ndarray] = False,
    workers: int = 0,
    unreadable: str = "raise",
    skipped: collections.Counter[str] | None = None,
    interrupts: Interrupts | None = None,
) -> Iterator[tuple[Any, np.ndarray, np.ndarray]]:
    """Yields `(embed_fn(images), where, rows)` of all batches of a split, as numpy arrays.

    `embed_fn` receives batches of one size, uint8 on the devices, and returns an array `[b ...]` or
    a tree of them. `rows [b]` are the rows of the split (-1 for padding), and `where [b]` is False
    for padding and, with `unreadable='skip'`, for images that cannot be read. Such images are
    counted in `skipped`; a name that it already contains is not logged again. With the argument
    `rows`, only these images are read. After a signal, `interrupts` end the embedding between two
    batches.
    """

    def compute(batch: dict[str, jax.Array]) -> Any:
        signal = None if interrupts is None else interrupts.row()
        tree = (embed_fn(batch["images"]), batch["where"], batch["indices"], signal)
        return on_every_device(tree, shards)

    if interrupts is not None:
        interrupts.agree()
    with pipeline.evaluation(
        split,
        transform_fn=transform_fn,
        batch_size=batch_size,
        host=jax.process_index() if shards.hosts > 1 else 0,
        hosts=shards.hosts,
        padded=shards.padded(batch_size),
        cache=cache,
        workers=workers,
        unreadable=unreadable,
        skipped=skipped,
        rows=rows,
    ) as batches:
        # The next batch is in the queue of the devices before the host takes a result.
        for tree in requested_ahead(map(compute, prefetch(batches, shards.rows))):
            outputs, where, indices, signal = jax.device_get(tree)
            if interrupts is not None:
                interrupts.agree_by_row(signal)
            if not all(np.isfinite(x[where]).all() for x in jax.tree.leaves(outputs)):
                raise FloatingPointError(
                    "embeddings are not finite: the parameters of the net are not, or the images "
                    "are not normalized as in training"
                )
            yield outputs, where, indices


def compute_of_run(run: Run, state: TrainState, *, shard: parts.Shard | None = None) -> int:
    """Computes the cached features of a run that are not on disk yet, by its backbone.

    Without `shard`, all of them. Returns how many images were read. Of several processes, number 0
    computes the features on its own devices while the others wait.
    """
    if run.cache is None:
        return 0
    cache, shards = run.cache, run.shards
    if shards.hosts > 1:
        state = state._replace(params={"net": state.params["net"]}, opt_state=())
        state = jax.device_get(devices.on_every_device(state, shards))
        shards = Shardings(jax.local_devices())

    def fill() -> int:
        if cache.is_complete:
            return 0
        return compute(
            cache,
            features_fn(run, (state.params, state.model_state), output=cache.output),
            title=run.options.net["name"],
            shard=shard,
            shards=shards,
            batch_size=run.options.evaluate.batch_size,
            workers=run.workers(images_of(run.train)),
            unreadable=run.options.unreadable,
        )

    count = hosts.on_process_0(fill)
    if run.shards.hosts > 1:
        for entry in cache.entries:
            hosts.check_shared(entry.folder / parts.TASK, option=_OPTION)
    return count


def features_fn(run: Run, variables: tuple[Any, Any], *, output: str) -> Callable[[Any], jax.Array]:
    """Returns a function from images to features of the backbone with these `variables`."""

    @jax.jit
    def of_images(params, model_state, images):
        x = run.normalize_fn(images)
        return backbone_features(run.net, params, model_state, x, output=output)

    return functools.partial(of_images, *variables)


def compute(
    cache: Cache,
    features_fn: Callable[[jax.Array], jax.Array],
    *,
    title: str,
    shard: parts.Shard | None = None,
    skipped: collections.Counter[str] | None = None,
    **options: Any,
) -> int:
    """Computes the features of `cache` that are not on disk yet; returns how many images it read.

    `features_fn(images uint8) -> [b d]`; `options` as for `embedded_batches`. With `shard`, only
    that part of every array is computed; processes with other shards, on this host or others, write
    the others. One file of rows is in memory at a time. With `unreadable='skip'`, images that
    cannot be read are counted in `skipped`; a name that it already contains is not logged again.
    """
    count = 0
    options["skipped"] = collections.Counter() if skipped is None else skipped
    for entry in cache.entries:
        of_entry = options | {"transform_fn": entry.transform_fn}
        try:
            for part in _parts_of(entry) if shard is None else [shard]:
                count += _compute_part(entry, part, features_fn, title=title, options=of_entry)
        except OSError as error:
            if error.errno is None:
                raise
            raise OSError(
                f"features cannot be written to {entry.folder}: {error.strerror}. Make space "
                f"there, ask for the permission, or name another folder by $DMLJAX_CACHE or, for a "
                f"run, {_OPTION}=FOLDER; the same command continues"
            ) from error
    return count


def _parts_of(entry: Entry) -> list[parts.Shard]:
    """Returns the parts of an unfinished entry; one part for a new one."""
    count = reading.json_object_or_empty(entry.folder / parts.TASK).get("parts", 1)
    return [parts.Shard(index, count) for index in range(count)]


def _compute_part(
    entry: Entry,
    part: parts.Shard,
    features_fn: Callable[[jax.Array], jax.Array],
    *,
    title: str,
    options: Mapping[str, Any],
) -> int:
    """Computes the files of one part that do not exist; returns how many images were read."""
    total = len(entry.images)
    files = part.rows(-(-total // _FILE_ROWS))
    first, stop = files.start * _FILE_ROWS, min(files.stop * _FILE_ROWS, total)
    if parts.is_complete(entry.folder / part.folder):
        return 0
    with parts.claimed(entry.folder, part, {"rows": total, "file_rows": _FILE_ROWS}) as folder:
        if parts.is_complete(folder):
            return 0
        paths = {i: folder / f"{i:012d}.npy" for i in range(first, stop, _FILE_ROWS)}
        start = next((i for i, path in paths.items() if not path.exists()), stop)
        options = {**options, "rows": range(start, stop)}
        batches = embedded_batches(features_fn, entry.images, **options) if start < stop else ()
        name = f"features of {title}" + (f", part {part}" if part.count > 1 else "")
        waiting: list[np.ndarray] = []
        timed, clock, next_file = 0, 0.0, start
        with Progress(name, stop - first, start=start - first, stream=sys.stdout) as progress:
            for features, where, rows in batches:
                if clock:  # The first batch compiles the program.
                    timed += int((rows >= 0).sum())
                clock = clock or time.perf_counter()
                features = np.where(where[:, None], features, np.nan)[rows >= 0]
                progress.advance(len(features))
                waiting.extend(features.astype(np.float32))
                while len(waiting) >= _FILE_ROWS or (waiting and next_file + len(waiting) == stop):
                    write_array(paths[next_file], np.stack(waiting[:_FILE_ROWS]))
                    next_file += _FILE_ROWS
                    del waiting[:_FILE_ROWS]
        seconds = (time.perf_counter() - clock) / timed if timed >= _LEAST_TIMED else None
        parts.finish(folder, rows=range(first, stop), seconds=seconds)
    return stop - start
