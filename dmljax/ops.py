"""Arrays in, arrays out: unit vectors, distances, pair masks, masked reductions, safe gradients.

Shared conventions:

* `x [b d]` are anchors and `y [n d]` references. `y is x` says "the batch itself".
* A distance is smaller for what is more alike.
* `where` masks are boolean, True counts. Nothing counted gives 0; a NaN that is counted stays NaN.
* Half-precision input is computed in float32; float64 stays float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Integer

__all__ = [
    "Array",
    "Pairs",
    "Triplets",
    "acos",
    "cosine",
    "divide",
    "dot",
    "euclidean",
    "logsumexp",
    "matmul",
    "mean",
    "mean_of_active",
    "normalize",
    "pairs",
    "reduce",
    "snr",
    "sqrt",
    "squared_euclidean",
    "sum",
    "sum_over_true",
    "threshold",
    "triplets_to_pairs",
    "unit",
    "unit_euclidean",
    "weighted",
    "widen",
]

Array = jax.Array | np.ndarray


class Pairs(NamedTuple):
    """Which of the `n` references are positives, and which negatives, of the `b` anchors."""

    positives: Bool[Array, "b n"]
    negatives: Bool[Array, "b n"]


class Triplets(NamedTuple):
    """Triplets (anchor, positive, negative) of `pairs` for which `select_fn` holds.

    `select_fn(d_ap, d_an, d_pn) -> bool` works element by element on `distances`, so the b n n
    choices are never stored. `d_pn` is None unless the batch is its own reference.
    """

    pairs: Pairs
    distances: Float[Array, "b n"]
    select_fn: Callable


Labels = Integer[Array, "b"] | Bool[Array, "b c"] | Pairs
ReferenceLabels = Integer[Array, "n"] | Bool[Array, "n c"]
DistanceFn = Callable[[Array, Array], Array]
MineFn = Callable[[Array, Pairs], Pairs | Triplets]
ReduceFn = Callable[[Array, Array], tuple[Array, Array]]


# --- numbers ------------------------------------------------------------------------------------


def widen(x: Array) -> jax.Array:
    """`x` in float32 at least; gradients come back in the dtype of `x`."""
    x = jnp.asarray(x)
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def matmul(x: Array, y: Array) -> jax.Array:
    """`x @ y` at the highest precision: TF32 and bfloat16 products are coarser than 1e-3."""
    return jnp.matmul(x, y, precision=jax.lax.Precision.HIGHEST)


def sqrt(x: Array) -> jax.Array:
    """Square root with gradient 0, not infinity, at 0. Negative rounding noise counts as 0."""
    positive = ~(x <= 0)  # NaN passes
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, x, 1)), 0)


def acos(x: Array) -> jax.Array:
    """Arc cosine with gradient 0, not infinity, at -1 and 1, and for rounding noise beyond them."""
    inside = ~(jnp.abs(x) >= 1)  # NaN passes
    return jnp.where(inside, jnp.arccos(jnp.where(inside, x, 0)), jnp.where(x > 0, 0, np.pi))


def logsumexp(x: Array, *, where: Array, axis: int = -1, keepdims: bool = False) -> jax.Array:
    """log sum exp over the entries that count; 0 (not -inf) where none does."""
    some = jnp.any(where, axis=axis, keepdims=True)
    where = jnp.broadcast_to(where, x.shape)
    peak = jax.lax.stop_gradient(
        jnp.max(x, axis=axis, keepdims=True, where=where, initial=-jnp.inf)
    )
    finite = jnp.abs(peak) < jnp.inf
    peak = jnp.where(finite, peak, 0)  # NaN becomes 0 here and returns below
    # Entries that do not count may overflow exp, and their gradient would be 0 * inf.
    gaps = x - peak
    # A compiler may compute x twice with other rounding, and a unit of rounding of huge x is huge:
    # the largest gap, which is 0, may come out positive, or so negative that nothing is left of 1.
    gaps = gaps - jax.lax.stop_gradient(jnp.maximum(gaps, 0))
    terms = jnp.exp(jnp.where(where, gaps, -jnp.inf))
    total = jnp.sum(terms, axis=axis, keepdims=True)
    total = total + jax.lax.stop_gradient(jnp.where(finite, jnp.maximum(1 - total, 0), 0))
    result = jnp.where(some, jnp.log(jnp.where(some, total, 1)) + peak, 0)
    return result if keepdims else jnp.squeeze(result, axis)


def normalize(x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
    """Unit vectors along the last axis. A zero vector stays zero and has gradient zero."""
    x = widen(x)
    # Dividing by the largest entry first keeps the squares from under- and overflowing.
    peak = jax.lax.stop_gradient(jnp.max(jnp.abs(x), axis=-1, keepdims=True))
    x = x / jnp.where(peak > 0, peak, 1)
    squares = jnp.sum(x * x, axis=-1, keepdims=True)
    return x * jnp.where(squares == 0, 0, jax.lax.rsqrt(jnp.where(squares == 0, 1, squares)))


# --- distances (x [b d], y [n d]) -> [b n] ------------------------------------------------------


def squared_euclidean(x: Float[Array, "b d"], y: Float[Array, "n d"]) -> Float[Array, "b n"]:
    """|x - y|^2, exact to rounding for near pairs too, in value and gradient.

    The matrix-product form |x|^2 + |y|^2 - 2 xy loses every digit once points are closer than the
    rounding of their norms, as they are in trained classes. So close pairs, which are few, are
    taken one by one as differences, and all others come from the product.
    """
    own = y is x
    x = widen(x)
    return _squared(x, x if own else widen(y), own)


def euclidean(
    x: Float[Array, "b d"], y: Float[Array, "n d"], *, p: float = 2, power: float = 1
) -> Float[Array, "b n"]:
    """|x - y|_p ^ power. Other `p` than 2 go over the dimensions one by one, in O(b n) memory."""
    if p == 2:
        squares = squared_euclidean(x, y)
        return squares if power == 2 else _power(sqrt(squares), power)

    @jax.checkpoint
    def add(total, columns):
        gap = columns[0][:, None] - columns[1][None, :]
        return total + _power(jnp.where(gap == 0, 0, jnp.abs(gap)), p), None

    x, y = widen(x), widen(y)
    zeros = jnp.zeros((len(x), len(y)), jnp.result_type(x, y))
    total, _ = jax.lax.scan(add, zeros, (x.T, y.T))
    return _power(total, power / p)


def cosine(x: Float[Array, "b d"], y: Float[Array, "n d"]) -> Float[Array, "b n"]:
    """1 - cos(x, y)."""
    unit_x = normalize(x)
    return 1 - matmul(unit_x, (unit_x if y is x else normalize(y)).T)


def dot(x: Float[Array, "b d"], y: Float[Array, "n d"]) -> Float[Array, "b n"]:
    """-x.y, so that smaller is more alike."""
    return -matmul(widen(x), widen(y).T)


def snr(x: Float[Array, "b d"], y: Float[Array, "n d"]) -> Float[Array, "b n"]:
    """var(x - y) / var(x), unbiased: the inverse signal-to-noise ratio (Yuan et al., CVPR 2019)."""
    own = y is x
    x = widen(x)
    x = x - jnp.mean(x, axis=1, keepdims=True)
    signal = jnp.sum(x * x, axis=1, keepdims=True)
    y = x if own else widen(y) - jnp.mean(widen(y), axis=1, keepdims=True)
    # An anchor without variance carries no signal; its distances are 0 rather than infinite.
    some = signal != 0
    return jnp.where(some, squared_euclidean(x, y) / jnp.where(some, signal, 1), 0)


def unit(distance_fn: DistanceFn) -> DistanceFn:
    """The distance between unit vectors: `distance_fn` after `normalize`."""

    @functools.wraps(distance_fn)
    def on_unit_vectors(x, y):
        unit_x = normalize(x)
        return distance_fn(unit_x, unit_x if y is x else normalize(y))

    return on_unit_vectors


def unit_euclidean(x: Float[Array, "b d"], y: Float[Array, "n d"]) -> Float[Array, "b n"]:
    """|x/|x| - y/|y||: what miners read, and what a loss uses unless told otherwise."""
    return unit(euclidean)(x, y)


def _power(x: Array, power: float) -> jax.Array:
    if power == 1:
        return x
    some = ~(x <= 0)
    return jnp.where(some, jnp.where(some, x, 1) ** power, 0)


# Below this share of the squared norms the product form has lost seven of its bits.
_NEAR = 2.0**-7


def _shifted(x, y):
    """Both less the mean of y: distances stay, norms shrink to the spread of the data."""
    shift = jnp.mean(y, axis=0, keepdims=True)
    return x - shift, y - shift


def _products(x, y):
    """|x - y|^2 by products, and which pairs are too near for that."""
    x, y = _shifted(x, y)
    norms = jnp.sum(x * x, axis=1)[:, None] + jnp.sum(y * y, axis=1)[None, :]
    squares = norms - 2 * matmul(x, y.T)
    return jnp.maximum(squares, 0), squares <= _NEAR * norms


def _set_near(squares, near, x, y):
    rows = jnp.arange(len(x))

    def body(carry):
        column, squares = carry
        gap = x - y.at[column].get(mode="fill", fill_value=0)
        return _next_true(near, column), squares.at[rows, column].set(
            jnp.sum(gap * gap, axis=1), mode="drop"
        )

    return _while_true(near, body, squares)


def _add_near(gradients, weights, near, x, y):
    """Adds the near pairs' share, 2 w (x - y) and its opposite, to the gradients of x and y."""
    rows = jnp.arange(len(x))

    def body(carry):
        column, (dx, dy) = carry
        gap = x - y.at[column].get(mode="fill", fill_value=0)
        gap = gap * 2 * weights.at[rows, column].get(mode="fill", fill_value=0)[:, None]
        return _next_true(near, column), (dx + gap, dy.at[column].add(-gap, mode="drop"))

    return _while_true(near, body, gradients)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _squared(x, y, own):
    return _squared_forward(x, y, own)[0]


def _squared_forward(x, y, own):
    squares, near = _products(x, y)
    if own:
        diagonal = jnp.eye(len(x), dtype=bool)
        squares, near = jnp.where(diagonal, 0, squares), near & ~diagonal
    return _set_near(squares, near, x, y), (x, y, near)


def _squared_backward(own, residual, weights):
    del own
    x, y, near = residual
    far = jnp.where(near, 0, weights)
    shifted_x, shifted_y = _shifted(x, y)
    dx = 2 * (jnp.sum(far, axis=1)[:, None] * shifted_x - matmul(far, shifted_y))
    dy = 2 * (jnp.sum(far, axis=0)[:, None] * shifted_y - matmul(far.T, shifted_x))
    return _add_near((dx, dy), weights, near, x, y)


_squared.defvjp(_squared_forward, _squared_backward)


# --- loops over the True entries of a mask ------------------------------------------------------


def _next_true(mask, after):
    """Per row, the first True column past `after`; the row's length where there is none."""
    columns = jnp.arange(mask.shape[1], dtype=jnp.int32)[None, :]
    rest = jnp.where(mask & (columns > after[:, None]), columns, mask.shape[1])
    return jnp.min(rest, axis=1, initial=mask.shape[1])


def _while_true(mask, body, initial):
    """`body((column [b], carry))` for the first True of every row, then the second, and so on."""
    first = _next_true(mask, jnp.full(len(mask), -1, jnp.int32))
    return jax.lax.while_loop(lambda c: jnp.any(c[0] < mask.shape[1]), body, (first, initial))[1]


def sum_over_true(fn: Callable, mask: Bool[Array, "b n"], *operands: Any) -> Any:
    """The sum over t of `fn(column, valid, *operands)`, with each row's t-th True of `mask`.

    `column [b]` is where that entry stands and `valid [b]` False for rows that have run out. There
    are as many rounds as the fullest row has True entries, decided while running, so a loss over
    triplets costs O(b n) memory and, with K images per class, O(b n K) time. Gradients flow into
    the float `operands` by running the rounds again; `fn` must not close over traced arrays.
    """
    return _sum_over_true(fn, jnp.asarray(mask), jax.tree.map(jnp.asarray, operands))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_over_true(fn, mask, operands):
    width = mask.shape[1]

    def call(column):
        # Rows that ran out read column 0 and are told so.
        return fn(jnp.where(column < width, column, 0), column < width, *operands)

    def body(carry):
        column, total = carry
        return _next_true(mask, column), jax.tree.map(jnp.add, total, call(column))

    shapes = jax.eval_shape(call, jax.ShapeDtypeStruct(mask.shape[:1], jnp.int32))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return _while_true(mask, body, zeros)


def _sum_over_true_forward(fn, mask, operands):
    return _sum_over_true(fn, mask, operands), (mask, operands)


def _sum_over_true_backward(fn, residual, cotangent):
    mask, operands = residual
    leaves, structure = jax.tree.flatten(operands)
    smooth = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]
    floats = [leaf for leaf, s in zip(leaves, smooth, strict=True) if s]
    width = mask.shape[1]

    def body(carry):
        column, total = carry

        def call(*floats):
            fill = iter(floats)
            mixed = [next(fill) if s else leaf for leaf, s in zip(leaves, smooth, strict=True)]
            whole = jax.tree.unflatten(structure, mixed)
            return fn(jnp.where(column < width, column, 0), column < width, *whole)

        gradients = jax.vjp(call, *floats)[1](cotangent)
        return _next_true(mask, column), jax.tree.map(jnp.add, total, list(gradients))

    fill = iter(_while_true(mask, body, [jnp.zeros_like(leaf) for leaf in floats]))
    zeros = [np.zeros(leaf.shape, jax.dtypes.float0) for leaf in leaves]
    mixed = [next(fill) if s else zero for zero, s in zip(zeros, smooth, strict=True)]
    return np.zeros(mask.shape, jax.dtypes.float0), jax.tree.unflatten(structure, mixed)


_sum_over_true.defvjp(_sum_over_true_forward, _sum_over_true_backward)


# --- pairs --------------------------------------------------------------------------------------


def pairs(
    labels: Labels,
    reference_labels: ReferenceLabels | None = None,
    *,
    ids: Integer[Array, "b"] | None = None,
    reference_ids: Integer[Array, "n"] | None = None,
    where: Bool[Array, "b"] | None = None,
    reference_where: Bool[Array, "n"] | None = None,
) -> Pairs:
    """Masks of the positive and negative pairs of anchors and references.

    Without `reference_labels` the batch is its own reference, and a row is neither positive nor
    negative of itself: it is left out by position. With references nothing is left out, unless
    `ids` and `reference_ids` name the same thing. `labels` are integers, multi-hot rows (sharing
    one class makes a positive), or ready `Pairs`, which only get the other masks applied.
    """
    own = reference_labels is None and not (isinstance(labels, Pairs) and reference_ids is not None)
    if isinstance(labels, Pairs):
        alike, unlike = map(jnp.asarray, labels)
        own = own and alike.shape[0] == alike.shape[1]
    else:
        alike = _share_a_class(labels, labels if reference_labels is None else reference_labels)
        unlike = ~alike
    keep = ~jnp.eye(alike.shape[0], dtype=bool) if own else jnp.ones(alike.shape, bool)
    if ids is not None:
        other = ids if reference_ids is None else reference_ids
        keep &= jnp.asarray(ids)[:, None] != jnp.asarray(other)[None, :]
    if where is not None:
        keep &= jnp.asarray(where)[:, None]
    if own and reference_where is None:
        reference_where = where
    if reference_where is not None:
        keep &= jnp.asarray(reference_where)[None, :]
    return Pairs(alike & keep, unlike & keep)


def _share_a_class(labels, reference_labels):
    labels, reference_labels = jnp.asarray(labels), jnp.asarray(reference_labels)
    if labels.ndim == 1:
        return labels[:, None] == reference_labels[None, :]
    return matmul(labels.astype(jnp.float32), reference_labels.astype(jnp.float32).T) > 0


def triplets_to_pairs(chosen: Pairs | Triplets) -> Pairs:
    """The pairs that stand in at least one chosen triplet. `Pairs` come back unchanged."""
    if isinstance(chosen, Pairs):
        return chosen
    (positives, negatives), distances, select_fn = chosen
    square = distances.shape[0] == distances.shape[1]

    def mark(column, valid, distances, negatives):
        d_ap = jnp.take_along_axis(distances, column[:, None], axis=1)
        d_pn = distances[column] if square else None
        selected = select_fn(d_ap, distances, d_pn) & negatives & valid[:, None]
        hit = jnp.any(selected, axis=1)
        rows = jnp.arange(len(column))
        return jnp.zeros(negatives.shape, jnp.int32).at[rows, column].add(hit), selected.astype(
            jnp.int32
        )

    kept = sum_over_true(mark, positives, distances, negatives)
    return Pairs(positives & (kept[0] > 0), negatives & (kept[1] > 0))


# --- reductions (entries, where) -> (total, count); `reduce` divides once -----------------------


def reduce(reduce_fn: ReduceFn | None, entries: Array, where: Bool[Array, "..."]) -> jax.Array:
    """total / count, 0 where nothing counts; without `reduce_fn` the entries, 0 where masked."""
    if reduce_fn is None:
        return jnp.where(where, entries, 0)
    return divide(*reduce_fn(entries, where))


def divide(total: Array, count: Array) -> jax.Array:
    """total / count, and `total` itself where the count is 0."""
    return total / jnp.where(count > 0, count, 1)


def mean(entries: Array, where: Array) -> tuple[Array, Array]:
    """The mean over all entries that count."""
    return jnp.sum(entries, where=where), jnp.sum(where, dtype=entries.dtype)


def sum(entries: Array, where: Array) -> tuple[Array, Array]:
    """The sum over all entries that count. A count of 0 says: do not divide."""
    return jnp.sum(entries, where=where), jnp.zeros((), entries.dtype)


def mean_of_active(entries: Array, where: Array) -> tuple[Array, Array]:
    """The mean over the entries above 0, so that solved pairs do not dilute the gradient."""
    return mean(entries, where & ~(entries <= 0))  # NaN passes


def threshold(low: float = -np.inf, high: float = np.inf) -> ReduceFn:
    """The mean over the entries strictly between `low` and `high`."""
    return lambda entries, where: mean(entries, where & ~(entries <= low) & ~(entries >= high))


def weighted(weights: Float[Array, "b"], reduce_fn: ReduceFn = mean) -> ReduceFn:
    """`reduce_fn` of entries times their anchor's weight; class weights are `weights[labels]`."""

    def weigh(entries, where):
        scale = jnp.reshape(weights, (-1,) + (1,) * (entries.ndim - 1))
        return reduce_fn(entries * scale.astype(entries.dtype), where)

    return weigh
