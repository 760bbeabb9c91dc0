"""Applies a function of images to every image of a split."""

import collections
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from dmljax.data import pipeline
from dmljax.data.splits import Split
from dmljax.data.transforms.transform import Transform
from dmljax.train.devices import Shardings, on_every_device, prefetch, requested_ahead
from dmljax.train.interrupts import Interrupts


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
