"""Features of a frozen backbone, computed once for every image: `data.features.Cache` is filled.

Files of some hundred rows are written, each completely or not at all. A killed process continues
with the first file that does not exist.
"""

import collections
import functools
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from flax import traverse_util

from dmljax.data.features import Cache, Entry
from dmljax.data.splits import images_of, subset
from dmljax.files import parts, reading
from dmljax.files.writing import write_array
from dmljax.hints import Progress
from dmljax.methods.assemble import backbone_features
from dmljax.train import devices, hosts
from dmljax.train.devices import Shardings
from dmljax.train.embedding import embed, embedded_batches
from dmljax.train.run import Run
from dmljax.train.step import TrainState

_FILE_ROWS = 256
_LEAST_TIMED = 64  # images; fewer may have been read while the first batch was compiled
_CENTERED_IMAGES = 10_000
_SHRINKAGE = 0.1
_OPTION = "--config.runtime.features"


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


def centered(run: Run, state: TrainState) -> TrainState:
    """Returns the state with mean, scale and directions of the features in `CenteredDense`.

    The scale is the mean norm of centered features over the square root of their width. The kernel
    gets the principal directions, each divided by a power of its deviation (`run.whiten`). They
    are measured on at most 10,000 training images, as for evaluation. Without such a layer, the
    state stays as it is.
    """
    statistics = traverse_util.flatten_dict(state.model_state.get("batch_stats", {}))
    layers = [path[:-1] for path in statistics if path[-1] == "scale"]
    layers = [layer for layer in layers if (*layer, "mean") in statistics]
    if run.taken is not None:  # Layers of the run to start from are fitted already.
        layers = [layer for layer in layers if not np.any(np.asarray(statistics[*layer, "mean"]))]
    if not layers:
        return state
    if run.pooled_output is None:
        raise ValueError(
            "dense_fn='centered_dense' needs pooled features: leave out method.pool_fn"
        )
    rows = np.random.default_rng(0).permutation(len(run.train))[:_CENTERED_IMAGES]
    train = subset(run.train, np.sort(rows))
    features = embed(
        features_fn(run, (state.params, state.model_state), output=run.pooled_output),
        train,
        transform_fn=run.eval_transform_fn,
        batch_size=run.options.evaluate.batch_size,
        shards=run.shards,
        workers=run.workers(train),
        unreadable=run.options.unreadable,
    )
    features = features[np.isfinite(features).all(axis=1)].astype(np.float64)
    mean = features.mean(axis=0)
    size = np.linalg.norm(features - mean, axis=1).mean() / np.sqrt(len(mean))
    size = size if size > 0 else 1.0
    params = traverse_util.flatten_dict(state.params)
    for layer in layers:
        kernel = params[*layer, "kernel"]
        directions = whitened((features - mean) / size, kernel.shape[1], run.whiten)
        params[*layer, "kernel"] = _like(kernel, directions)
        for name, value in (("mean", mean), ("scale", size)):
            statistics[*layer, name] = _like(statistics[*layer, name], value)
    model_state = {**state.model_state, "batch_stats": traverse_util.unflatten_dict(statistics)}
    return state._replace(params=traverse_util.unflatten_dict(params), model_state=model_state)


def whitened(features: np.ndarray, dim: int, amount: float = 0.5) -> np.ndarray:
    """Computes `dim` directions `[width dim]` of centered features, to initialize a head.

    Principal directions, each divided by (variance + a tenth of their mean variance)^(amount / 2):
    0 is PCA, 1 is whitening. The tenth keeps directions of little variance from becoming noise.
    Where the features have fewer directions, random ones are added, orthogonal to these
    as long as the width allows. The mean norm of the columns is 1 in square.
    """
    _, values, rows = np.linalg.svd(features, full_matrices=False)
    directions, variances = rows.T, np.square(values) / len(features)
    if (missing := dim - directions.shape[1]) > 0:
        others = np.random.default_rng(0).normal(size=(features.shape[1], missing))
        if dim <= features.shape[1]:
            others = np.linalg.qr(others - directions @ (directions.T @ others))[0]
        else:
            others /= np.linalg.norm(others, axis=0)
        directions = np.concatenate([directions, others], axis=1)
        variances = np.concatenate([variances, np.zeros(missing)])
    directions, variances = directions[:, :dim], variances[:dim]
    floor = _SHRINKAGE * variances.mean()
    kernel = directions / np.maximum(variances + floor, 1e-12) ** (amount / 2)
    return kernel * np.sqrt(dim) / np.linalg.norm(kernel)


def _like(old: jax.Array, value: Any) -> jax.Array:
    return jax.device_put(np.asarray(value, np.float32).reshape(old.shape), old.sharding)


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
    try:
        count = reading.json_file(entry.folder / parts.TASK)["parts"]
    except (FileNotFoundError, NotADirectoryError):  # `parts.claimed` says what is wrong
        count = 1
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
        starts = range(first, stop, _FILE_ROWS)
        start = next((i for i in starts if not (folder / f"{i:012d}.npy").exists()), stop)
        options = {**options, "rows": range(start, stop)}
        batches = embedded_batches(features_fn, entry.images, **options) if start < stop else ()
        name = f"features of {title}" + (f", part {part}" if part.count > 1 else "")
        with Progress(name, stop - first, start=start - first, stream=sys.stdout) as shown:
            seconds = _write_files(folder, batches, shown, start=start, stop=stop)
        parts.finish(folder, rows=range(first, stop), seconds=seconds)
    return stop - start


def _write_files(
    folder: pathlib.Path,
    batches: Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]],
    progress: Progress,
    *,
    start: int,
    stop: int,
) -> float | None:
    """Writes the features of rows from `start` on; returns the seconds of one, if many."""
    waiting: list[np.ndarray] = []
    timed, clock = 0, 0.0
    for features, where, rows in batches:
        if clock:  # The first batch compiles the program.
            timed += int((rows >= 0).sum())
        clock = clock or time.perf_counter()
        features = np.where(where[:, None], features, np.nan)[rows >= 0].astype(np.float32)
        progress.advance(len(features))
        waiting.extend(features)
        while len(waiting) >= _FILE_ROWS or (waiting and start + len(waiting) == stop):
            write_array(folder / f"{start:012d}.npy", np.stack(waiting[:_FILE_ROWS]))
            start += len(waiting[:_FILE_ROWS])
            del waiting[:_FILE_ROWS]
    return (time.perf_counter() - clock) / timed if timed >= _LEAST_TIMED else None
