"""The classes that a loss against proxies compares with: all, or a random sample of them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from dmljax.ops.devices import current_mesh
from dmljax.ops.fold import Side, pad_rows
from dmljax.ops.types import Array

__all__ = ["ClassTiles"]


class ClassTiles(NamedTuple):
    """How a loss against proxies goes over the classes: the same loss in less memory.

    * `size`: classes of a tile; None: all classes of a device.
    * `share`: the fraction of the classes outside of the batch that take part, above 0 and at most
      1. Below 1, it is partial FC (An et al., Partial FC: Training 10 Million Identities on a
      Single Machine, ICCVW 2021; Killing Two Birds with One Stone, CVPR 2022): the classes of the
      batch and a random sample of the others. Of every 1 / share neighboring classes, rounded to an
      integer, one is drawn: 0.1 draws one of ten. The draw does not depend on the devices.
    * `key`: the randomness of a share below 1; another key for each step.
    * `unbiased`: a drawn class counts 1 / share times, so that the expectation of every sum over
      classes is the sum over all of them. This holds for the denominator of a softmax, not for its
      logarithm. False is partial FC as published.
    """

    size: int | None = None
    share: float = 1.0
    key: jax.Array | None = None
    unbiased: bool = False


def class_rows(proxies: Array, labels: Array, tiles: ClassTiles | None) -> tuple[Side, int | None]:
    """Returns the classes as the rows of a fold, and the size of its tiles.

    Each row has its class as a label. In an unbiased sample, `extra` is how often each row counts.
    Each device draws among the proxies that it holds.

    Args:
        labels: The class of each row of the batch; -1 for rows that do not count.
    """
    _check(tiles)
    numbers = jnp.arange(len(proxies), dtype=jnp.int32)
    rows = Side(proxies, numbers, jnp.ones(len(proxies), bool), numbers)
    if tiles is None:
        return rows, None
    if tiles.share < 1:
        rows = _drawn_rows(proxies, labels, tiles)
    return rows, tiles.size or len(rows.where)


def _check(tiles: Any) -> None:
    if tiles is None:
        return
    is_tiles = isinstance(tiles, ClassTiles) and 0 < tiles.share <= 1
    is_tiles = is_tiles and (
        tiles.size is None or (hasattr(tiles.size, "__index__") and tiles.size > 0)
    )
    if not is_tiles or (tiles.share < 1 and tiles.key is None):
        raise ValueError(
            f"`tiles` must be None or ops.ClassTiles, with a `size` that is a positive integer or "
            f"None, and a `share` above 0 and at most 1, below 1 with a `key`: got {tiles!r}"
        )


def _drawn_rows(proxies: Array, labels: Array, tiles: ClassTiles) -> Side:
    """Returns the classes of the batch and a sample of the others, as rows of each device."""
    classes, mesh = len(proxies), current_mesh()
    width = min(classes, round(1 / tiles.share))

    def local(proxies, labels, key):
        first = 0 if mesh is None else len(proxies) * jax.lax.axis_index(mesh.axis_names[0])
        batch = jnp.sort(labels)
        is_new = jnp.concatenate([jnp.ones(1, bool), batch[1:] != batch[:-1]])
        drawn, widths = _draw(key, classes, width, first, len(proxies))
        slots = jnp.clip(jnp.searchsorted(batch, drawn), 0, len(batch) - 1)
        numbers = jnp.concatenate([batch, drawn.astype(batch.dtype)])
        counts = jnp.concatenate([is_new & (batch >= 0), batch[slots] != drawn])
        indices = numbers - first
        is_here = (indices >= 0) & (indices < len(proxies)) & (numbers < classes)
        weights = jnp.concatenate([jnp.ones_like(batch), widths.astype(batch.dtype)])
        vectors = proxies[jnp.where(is_here, indices, 0)]
        return Side(vectors, numbers, counts & is_here, numbers, weights)

    if mesh is None:
        rows = local(proxies, labels, tiles.key)
    else:
        split, everywhere = PartitionSpec(mesh.axis_names[0]), PartitionSpec()
        mapped = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(split, everywhere, everywhere),
            out_specs=split,
            check_vma=False,
        )
        rows = mapped(pad_rows(proxies, mesh.shape[mesh.axis_names[0]]), labels, tiles.key)
    return rows if tiles.unbiased else rows._replace(extra=())


def _draw(key, classes: int, width: int, first, rows: int) -> tuple[Array, Array]:
    """Draws one of each `width` neighboring classes; also returns the number of neighbors.

    A neighborhood may reach over the border to the next device. Both devices draw the same class of
    it, because the draw depends only on the key and on the index of the neighborhood.
    """
    j = first // width + jnp.arange((rows - 1) // width + 2, dtype=jnp.int32)
    widths = jnp.clip(classes - j * width, 1, width)  # the last one may be smaller
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, j)
    bits = jax.vmap(lambda key: jax.random.bits(key, (), jnp.uint32))(keys)
    return j * width + (bits % widths.astype(jnp.uint32)).astype(jnp.int32), widths
