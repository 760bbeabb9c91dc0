"""The filter of `ranking`: products in bfloat16 decide most comparisons, float32 the others.

Each vector is the sum of two in bfloat16 and a small rest, and three products of these parts are
added (`_terms`). Their sum differs from the similarity in float32 by no more than a radius
(`_approximate`). It decides whether a negative precedes a positive if both similarities are farther
apart than the radius. For every other pair, `_pair_similarities` computes the similarity in
float32, in the same way as that of the positive, so exact ties stay ties. Similarities that differ
by the rounding of float32 may come in another order than without the filter.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dmljax.ops.loops import vary
from dmljax.retrieval.rules import mask, precedes
from dmljax.retrieval.tiles import Tile

_HALF = jnp.finfo(jnp.bfloat16)
_PAIRS = 8192  # the fewest open pairs whose similarities are computed at once
_SEGMENT = 128  # columns in which open pairs are counted together; divides the side of every tile


@jax.jit
def count_rows(
    counts: Int[Array, "b r"], thresholds: Float[Array, "b r"], rows: Tile, columns: Tile
) -> Int[Array, "b r"]:
    """Adds, for every row, how many of its negatives precede each threshold."""
    ahead, is_open = _screen(thresholds, rows, columns)
    segments = is_open.reshape(-1, _SEGMENT)
    segment_counts = jnp.sum(segments, axis=1, dtype=jnp.int32)
    ends = jnp.cumsum(segment_counts)
    starts = ends - segment_counts
    size = max(_PAIRS, is_open.size // 1024)  # large tiles of equal vectors take few rounds

    def add_open(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        """Adds the next open pairs from index `start`."""
        start, counts = carry
        numbers = start + jnp.arange(size, dtype=jnp.int32)
        # Each segment with a pair writes its index where its pairs begin; later ones are larger.
        first = jnp.maximum(starts - start, 0)
        first = jnp.where((segment_counts > 0) & (ends > start), first, size)
        segment = jnp.zeros(size, jnp.int32).at[first].set(jnp.arange(len(ends)), mode="drop")
        segment = jax.lax.cummax(segment)
        ranks = jnp.cumsum(segments[segment], axis=1, dtype=jnp.int32)
        within = jnp.argmax(ranks > (numbers - starts[segment])[:, None], axis=1)
        row, position = jnp.divmod(segment, is_open.shape[1] // _SEGMENT)
        column = position * _SEGMENT + within
        similarities = _pair_similarities(
            rows.vectors[row], columns.vectors[column], rows.offsets[row], columns.offsets[column]
        )
        is_ahead = precedes(similarities[:, None], thresholds[row])
        is_ahead &= (numbers < ends[-1])[:, None]
        return start + size, counts.at[row].add(is_ahead.astype(jnp.int32))

    carry = vary((jnp.int32(0), counts + ahead))
    return jax.lax.while_loop(lambda carry: carry[0] < ends[-1], add_open, carry)[1]


@jax.jit
def similarities_at(rows: Tile, columns: Tile, indices: Int[Array, "b r"]) -> Float[Array, "b r"]:
    """Returns the similarities of every row to some columns, with the bits of the open pairs."""

    def of_column(index: Int[Array, "b"]) -> Float[Array, "b"]:
        vectors, offsets = columns.vectors[index], columns.offsets[index]
        return _pair_similarities(rows.vectors, vectors, rows.offsets, offsets)

    return jax.lax.map(of_column, indices.T).T


@functools.cache
def keeps_radius(device: jax.Device) -> bool:
    """Returns whether this device computes similarities as near as `_approximate` says, by a trial.

    A compiler that leaves out a rounding, or multiplies less precisely than it is asked to, would
    change ranks without a word.
    """
    x = np.random.default_rng(0).normal(size=(256, 64)).astype(np.float32)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    arrays = x, np.zeros(len(x), np.float32), np.zeros((len(x), 1), np.int32)
    rows = Tile(*jax.device_put(arrays, device))

    similarities, radius = jax.jit(lambda x: _approximate(_terms(x.vectors)[0], x, x))(rows)
    exact = x.astype(np.float64) @ x.T.astype(np.float64)
    return bool((np.abs(np.asarray(similarities) - exact) <= np.asarray(radius)).all())


def _screen(
    thresholds: Float[Array, "b r"], rows: Tile, columns: Tile
) -> tuple[Int[Array, "b r"], Bool[Array, "b n"]]:
    """Counts the pairs that the products decide to be ahead, and returns the open pairs."""
    limits = [t[:, None] for t in thresholds.T]
    similarities, radius = _approximate(_terms(rows.vectors)[0], rows, columns)
    is_left_out = mask(rows.groups[:, None], columns.groups[None])
    similarities = jnp.where(is_left_out, -jnp.inf, similarities)
    is_open = jnp.zeros(similarities.shape, bool)
    for t in limits:
        is_open |= ~precedes(similarities - radius, t) & precedes(similarities + radius, t)
    # A compiler may compute the similarities again for the counts and round them otherwise.
    # So they are compared here without the radius, and what is open is decided once.
    is_open = jax.lax.optimization_barrier(is_open)
    ahead = [jnp.sum(precedes(similarities, t) & ~is_open, axis=1, dtype=jnp.int32) for t in limits]
    return jnp.stack(ahead, axis=1), is_open


def _terms(x: Float[Array, "n d"]) -> tuple[Array, Array]:
    """Returns vectors as the rows, and as the columns, of the product that approximates x'y.

    x is `high`, its value rounded to bfloat16, plus `low`, the rounded rest, plus an error of at
    most u^2 |x|. The product adds high high', high low' and low high'.
    """
    # Not x.astype(half).astype(x.dtype): XLA leaves out such a pair on GPUs, and `low` would be 0.
    high = jax.lax.reduce_precision(x, exponent_bits=_HALF.nexp, mantissa_bits=_HALF.nmant)
    high, low = high.astype(_HALF.dtype), (x - high).astype(_HALF.dtype)
    rows, columns = (high, high, low), (high, low, high)
    return jnp.concatenate(rows, axis=1), jnp.concatenate(columns, axis=1)


def _approximate(
    row_terms: Float[Array, "b k"], rows: Tile, columns: Tile
) -> tuple[Float[Array, "b n"], Float[Array, "b n"]]:
    """Returns approximate similarities of rows to columns, and an upper bound on their error.

    From the true product p of two vectors, the product of their terms differs by at most
    (3 + 2 u + u^2) u^2 |q||g|, with the unit roundoff u of bfloat16: low low' and the errors of
    both vectors are missing (Cauchy-Schwarz). Sums of k terms in float32 in any order differ by at
    most k 2^-24 |q||g|, and adding the offsets by a few 2^-24 of their size. Devices that add in
    bfloat16 products cut digits off instead of rounding them, so four times that is taken, for the
    k terms of the filter and the d terms of `_pair_similarities`.
    """
    column_terms = _terms(columns.vectors)[1]
    products = jnp.matmul(row_terms, column_terms.T, preferred_element_type=jnp.float32)
    similarities = products + (rows.offsets[:, None] + columns.offsets[None])
    row_norm, column_norm = (jnp.sqrt(jnp.sum(t.vectors**2, axis=1)) for t in (rows, columns))
    row_offset, column_offset = (
        jnp.where(jnp.isfinite(t.offsets), jnp.abs(t.offsets), 0) for t in (rows, columns)
    )
    u, step = float(_HALF.eps) / 2, 2.0**-24
    terms = row_terms.shape[1] + rows.vectors.shape[1]
    of_products = 1.01 * (3.1 * u * u + 4 * (terms + 32) * step)
    radius = of_products * row_norm[:, None] * column_norm[None]
    radius += 32 * step * (row_offset[:, None] + column_offset[None]) + 1e-37
    return similarities, radius


@jax.jit
def _pair_similarities(
    x: Float[Array, "m d"], y: Float[Array, "m d"], of_x: Float[Array, "m"], of_y: Float[Array, "m"]
) -> Float[Array, "m"]:
    """Returns x'y plus the offsets of each pair, adding the halves of the terms until one is left.

    Every program of this function gives the same bits, whatever the number of pairs. A compiler may
    join a product and the sum that takes it to one operation, which rounds once instead of twice,
    in one program and not in another; a condition between them, here a NaN, prevents that.
    """
    terms = jnp.where(jnp.isnan(of_x)[:, None], jnp.nan, x * y)
    width = 1 << (terms.shape[1] - 1).bit_length()
    terms = jnp.pad(terms, ((0, 0), (0, width - terms.shape[1])))
    while width > 1:
        width //= 2
        terms = terms[:, :width] + terms[:, width:]
    return terms[:, 0] + (of_x + of_y)
