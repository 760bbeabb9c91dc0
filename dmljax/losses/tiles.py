"""Losses of large batches, in tiles: no matrix of all pairs is stored.

Each loss of `dmljax.losses` that can be computed in tiles has a form here. A form says what the
loss accumulates over a tile (`_fold`), and how it finishes. Tests hold each form to its loss.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dmljax import ops
from dmljax.losses import pairs, ranking, two_views
from dmljax.losses._common import sides
from dmljax.losses._fold import LogSumExp, OfColumns, Plan, Side, Sum, Total, count, fold
from dmljax.ops import Array
from dmljax.ops.devices import check_axes, default_tile

__all__ = ["tiled"]

# Positives of each anchor that are ranked at a time. A tile of `smooth_ap` has as many sigmoids for
# each pair.
_RANKED_AT_ONCE = 4


def tiled(loss_fn: Callable, *, tile: int | None = None, mesh: Mesh | None = None) -> Callable:
    """The same loss in memory that grows with the batch, not with its square.

    The returned function takes the arguments of `loss_fn`, except a miner, and has the same value
    and gradient up to rounding. It compares `tile` rows with `tile` rows at a time, keeps sums, and
    computes each tile again for the gradient. With a `mesh`, each device computes its share of the
    rows. The references then travel around the ring of devices, so that no device holds them all.
    Call it inside `jax.jit`: elsewhere, each call compiles again.

    In tiles exist `circle`, `clip`, `contrastive`, `multi_similarity`, `ntxent`, `recall_at_k`,
    `siglip`, `smooth_ap` and `supcon`. Labels are not `ops.Pairs`. `smooth_ap` and `recall_at_k`
    take one label for each row. `contrastive` and `ntxent`, which have an entry for each pair, take
    a `reduce_fn` that does not tell rows apart.

    Args:
        loss_fn: One of these losses, or a `functools.partial` of it.
        tile: Rows and columns of a tile. Memory grows with its square, as long as it is below the
            batch. None is 1,024, and 4,096 on accelerators, which take longer to start many small
            programs than to run them.
        mesh: The devices, on one axis. None computes on one device.

    >>> x = np.random.default_rng(0).normal(size=(100, 8)).astype(np.float32)
    >>> labels, loss_fn = np.arange(100) // 4, losses.tiled(losses.supcon, tile=32)
    >>> print(f"{loss_fn(x, labels):.3f} = {losses.supcon(x, labels):.3f}")
    8.640 = 8.640
    """
    if tile is not None and (isinstance(tile, bool) or not isinstance(tile, int) or tile < 1):
        raise ValueError(f"tile={tile!r} must be a number of rows, 1 or more, or None")
    if mesh is not None and len(mesh.axis_names) != 1:
        raise ValueError(f"mesh must have one axis, not {mesh.axis_names}")
    if mesh is not None:
        check_axes(mesh)
    function, bound = _unwrapped(loss_fn)
    form = _FORMS.get(function)
    if form is None:
        names = ", ".join(sorted(f.__name__ for f in _FORMS))
        raise ValueError(
            f"{getattr(function, '__name__', function)} does not exist in tiles: take one of "
            f"{names}, or leave out tile"
        )
    signature = inspect.signature(function)

    def loss(*args: Any, **keywords: Any) -> Array:
        arguments = signature.bind(*args, **{**bound, **keywords})
        arguments.apply_defaults()
        values = dict(arguments.arguments)
        if values.pop("mine_fn", None) is not None:
            raise ValueError(
                "a miner compares all pairs of the batch at once, not tiles: leave out the miner, "
                "or tile"
            )
        sides_fn = _of_views if "other" in values else _of_pairs
        inputs = [
            values.pop(name) for name in inspect.signature(sides_fn).parameters if name in values
        ]
        side = tile or default_tile(on_accelerator=_platform(mesh) != "cpu")
        return form(sides_fn(*inputs, tile=side, mesh=mesh), **values)

    parameters = [p for n, p in signature.parameters.items() if n != "mine_fn"]
    functools.update_wrapper(loss, function)
    loss.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return loss


def _platform(mesh: Mesh | None) -> str:
    return jax.default_backend() if mesh is None else mesh.devices.flat[0].platform


def _unwrapped(loss_fn: Callable) -> tuple[Callable, dict[str, Any]]:
    """The loss in a partial, and its keywords."""
    keywords: dict[str, Any] = {}
    while isinstance(loss_fn, functools.partial) and not loss_fn.args:
        keywords = loss_fn.keywords | keywords
        loss_fn = loss_fn.func
    return loss_fn, keywords


class _Sides(NamedTuple):
    """The rows and columns of the pairs of a loss."""

    rows: Side
    columns: Side
    plan: Plan

    def unit(self) -> _Sides:
        """Unit vectors, whose products are cosines."""
        rows = self.rows._replace(vectors=ops.normalize(self.rows.vectors))
        if self.plan.within_batch:
            return self._replace(rows=rows, columns=rows)
        columns = self.columns._replace(vectors=ops.normalize(self.columns.vectors))
        return self._replace(rows=rows, columns=columns)

    def fold(
        self, terms_fn: Callable, *params: Any, of_rows: Any = (), of_columns: Any = ()
    ) -> tuple:
        """`_fold.fold`, where `of_rows` and `of_columns` are the `extra` of the sides."""
        dtype = self.rows.vectors.dtype
        scalars = [jnp.asarray(p, dtype if isinstance(p, int | float) else None) for p in params]
        rows = self.rows._replace(extra=of_rows)
        columns = self.columns._replace(extra=of_columns)
        return fold(terms_fn, self.plan, rows, columns, *scalars)


def _of_pairs(
    embeddings, labels, references, reference_labels, where, *, tile: int, mesh: Mesh | None
) -> _Sides:
    if isinstance(labels, ops.Pairs):
        raise ValueError(
            "labels are ops.Pairs, which are masks of all pairs: in tiles, labels are int [b] or "
            "bool multi-hot [b c]. Leave out tile, or what makes the masks, such as a memory"
        )
    anchors, references, where = sides(embeddings, labels, references, reference_labels, where)
    within_batch = references is anchors
    labels, positions = jnp.asarray(labels), jnp.arange(len(anchors), dtype=jnp.int32)
    rows = columns = Side(anchors, labels, where, positions)
    if not within_batch:
        n = len(references)
        positions = jnp.arange(n, dtype=jnp.int32)
        columns = Side(references, jnp.asarray(reference_labels), jnp.ones(n, bool), positions)
    return _Sides(rows, columns, Plan(tile, mesh, within_batch))


def _of_views(embeddings, other, where, *, tile: int, mesh: Mesh | None) -> _Sides:
    x, y, where = two_views.views(embeddings, other, where)
    positions = jnp.arange(len(x), dtype=jnp.int32)
    rows, columns = (Side(vectors, positions, where, positions) for vectors in (x, y))
    return _Sides(rows, columns, Plan(tile, mesh, within_batch=False))


def _clip(sides, *, temperature, reduce_fn):
    def terms(tile, temperature):
        logits = tile.products() / temperature
        matches, others = tile.pairs
        of_columns = OfColumns(LogSumExp(logits.T, others.T))
        return LogSumExp(logits, others), of_columns, Sum(logits, matches), count(others)

    *normalizers, match, others = sides.unit().fold(terms, temperature)
    entries = [
        jnp.where(others > 0, jax.nn.softplus(normalizer - match), match - match)
        for normalizer in normalizers
    ]
    return ops.reduce(reduce_fn, (entries[0] + entries[1]) / 2, sides.rows.where)


def _siglip(sides, *, scale, bias, reduce_fn):
    def terms(tile, scale, bias):
        logits = scale * tile.products() + bias
        matches, others = tile.pairs
        return (Sum(jax.nn.softplus(jnp.where(matches, -logits, logits)), matches | others),)

    (entries,) = sides.unit().fold(terms, scale, bias)
    return ops.reduce(reduce_fn, entries, sides.rows.where)


def _ntxent(sides, *, temperature, reduce_fn):
    _check_of_pairs(reduce_fn)

    def normalizers(tile, temperature):
        negatives = tile.pairs.negatives
        return LogSumExp(tile.products() / temperature, negatives), count(negatives)

    def entries(tile, temperature):
        normalizer, has_negative = (of_rows[:, None] for of_rows in tile.rows.extra)
        logits = tile.products() / temperature
        entries = jnp.where(has_negative, jax.nn.softplus(normalizer - logits), logits - logits)
        return map(Total, reduce_fn(entries, tile.pairs.positives))

    sides = sides.unit()
    normalizer, negatives = sides.fold(normalizers, temperature)
    return ops.divide(*sides.fold(entries, temperature, of_rows=(normalizer, negatives > 0)))


def _supcon(sides, *, temperature, reduce_fn):
    def terms(tile, temperature):
        logits = tile.products() / temperature
        positives, negatives = tile.pairs
        normalizer = LogSumExp(logits, positives | negatives)
        return normalizer, Sum(logits, positives), count(positives), count(negatives)

    normalizer, total, positives, negatives = sides.unit().fold(terms, temperature)
    valid = (positives > 0) & jnp.any(negatives > 0)
    entries = jnp.where(valid, normalizer - ops.divide(total, positives), 0)
    return ops.reduce(reduce_fn, entries, valid)


def _multi_similarity(sides, *, alpha, beta, base, reduce_fn):
    def terms(tile, alpha, beta, base):
        over = tile.products() - base
        positives, negatives = tile.pairs
        soft_maxima = LogSumExp(-alpha * over, positives), LogSumExp(beta * over, negatives)
        return *soft_maxima, count(positives), count(negatives)

    pull, push, positives, negatives = sides.unit().fold(terms, alpha, beta, base)
    pull = jnp.where(positives > 0, jax.nn.softplus(pull), 0) / alpha
    push = jnp.where(negatives > 0, jax.nn.softplus(push), 0) / beta
    return ops.reduce(reduce_fn, pull + push, sides.rows.where)


def _circle(sides, *, margin, gamma, reduce_fn):
    def terms(tile, margin, gamma):
        cosines = tile.products()
        constants = jax.lax.stop_gradient(cosines)
        pull = -gamma * jax.nn.relu(1 + margin - constants) * (cosines - 1 + margin)
        push = gamma * jax.nn.relu(constants + margin) * (cosines - margin)
        positives, negatives = tile.pairs
        soft_maxima = LogSumExp(pull, positives), LogSumExp(push, negatives)
        return *soft_maxima, count(positives), count(negatives)

    pull, push, positives, negatives = sides.unit().fold(terms, margin, gamma)
    return ops.reduce(reduce_fn, jax.nn.softplus(pull + push), (positives > 0) & (negatives > 0))


def _contrastive(
    sides, *, pos_margin, neg_margin, power, pos_weight, neg_weight, distance_fn, reduce_fn
):
    _check_of_pairs(reduce_fn)

    def terms(tile, pos_margin, neg_margin):
        distances = distance_fn(tile.rows.vectors, tile.columns.vectors)
        pull = ops.power(jax.nn.relu(distances - pos_margin), power)
        push = ops.power(jax.nn.relu(neg_margin - distances), power)
        positives, negatives = tile.pairs
        return map(Total, (*reduce_fn(pull, positives), *reduce_fn(push, negatives)))

    pull, positives, push, negatives = sides.fold(terms, pos_margin, neg_margin)
    return pos_weight * ops.divide(pull, positives) + neg_weight * ops.divide(push, negatives)


def _smooth_ap(sides, *, temperature, reduce_fn):
    def precision(ranks, valid):
        rank_in_positives, rank = ranks
        return jnp.sum(jnp.where(valid, rank_in_positives / rank, 0), axis=1)

    total, number = _sum_over_positives(
        precision, sides.unit(), temperature, with_self=True, among_positives=True
    )
    return ops.reduce(reduce_fn, 1 - ops.divide(total, number), number > 0)


def _recall_at_k(sides, *, ks, rank_temperature, k_temperature, reduce_fn):
    ranking.check_ks(ks)
    k_row = jnp.asarray(ks, sides.rows.vectors.dtype)[None, :]

    def within_k(ranks, valid, k_row, rank_temperature):
        gaps = k_row[:, None, :] - ranks[-1][:, :, None]  # [b m k]
        within = jax.nn.sigmoid(gaps / rank_temperature)
        return jnp.sum(jnp.where(valid[:, :, None], within, 0), axis=1)

    total, number = _sum_over_positives(
        within_k, sides.unit(), k_temperature, k_row, rank_temperature
    )
    recall = ops.divide(jnp.minimum(total, k_row), jnp.minimum(number[:, None], k_row))
    return ops.reduce(reduce_fn, 1 - jnp.mean(recall, axis=1), number > 0)


def _sum_over_positives(
    fn, sides, temperature, *params, with_self: bool = False, among_positives: bool = False
) -> tuple[Array, Array]:
    """For each row, the sum over its positives of `fn` of their soft ranks; and their number.

    Positives are numbered within their class. Each round ranks those with the next few numbers,
    `[b m]`: it takes their logits from the tiles, then compares them with all columns. `fn(ranks,
    valid, *params)` gets the ranks among all pairs, with `among_positives` after those among
    positives, and which of them exist. `with_self` counts a row of a batch that is compared with
    itself as one more of its positives, if it has any.
    """
    rows, columns, plan = sides
    if rows.labels.ndim != 1:
        raise ValueError(
            f"labels {list(rows.labels.shape)} are multi-hot: in tiles, this loss takes one label "
            "for each row. Leave out tile"
        )
    with_self = with_self and plan.within_batch
    kinds = 1 + among_positives

    def counts(tile):
        return (count(tile.pairs.positives),)

    def numbers(tile):
        earlier = tile.columns.positions[None, :] < tile.rows.positions[:, None]
        return (count(tile.pairs.positives & earlier),)

    constants = _Sides(*jax.lax.stop_gradient((rows, columns)), plan)
    (number,) = constants.fold(counts)
    has_positive = number > 0
    (number_in_class,) = constants._replace(rows=constants.columns).fold(numbers)
    number_in_class = number_in_class.astype(jnp.int32)
    last = jnp.max(jnp.where(columns.where, number_in_class, 0))
    firsts = jnp.arange(0, len(columns.where), _RANKED_AT_ONCE)

    def positives_of(tile):
        positives, negatives = tile.pairs
        if with_self:
            positives = positives | (tile.is_itself & tile.rows.extra[0][:, None])
        return positives, positives | negatives

    def logits_of(tile, temperature, of_round):
        logits, (positives, _) = tile.products() / temperature, positives_of(tile)
        selected = [positives & (tile.columns.extra == i)[None, :] for i in of_round]
        return *(Sum(logits, s) for s in selected), *map(count, selected)

    def ahead(tile, temperature):
        logits, masks = tile.products() / temperature, positives_of(tile)
        ahead = [jax.nn.sigmoid(logits - s[:, None]) for s in tile.rows.extra[1]]
        return [Sum(a, mask) for mask in masks[-kinds:] for a in ahead]

    def of_round(i, valid, sides, temperature, has_positive, number_in_class, params):
        of_round = i[0] * _RANKED_AT_ONCE + jnp.arange(_RANKED_AT_ONCE)
        sides, of_rows = _Sides(*sides, plan), (has_positive,)
        results = sides.fold(
            logits_of, temperature, of_round, of_rows=of_rows, of_columns=number_in_class
        )
        logits, exists = jnp.array_split(jnp.stack(results), 2)  # [m b]
        sums = sides.fold(ahead, temperature, of_rows=(*of_rows, tuple(logits)))
        # A positive is half ahead of itself, which does not count.
        ranks = [0.5 + rank.T for rank in jnp.array_split(jnp.stack(sums), kinds)]
        return fn(ranks, exists.T > 0, *params)

    total = ops.sum_over_true(
        of_round,
        (firsts <= last)[None, :],
        (rows, columns),
        temperature,
        has_positive,
        number_in_class,
        params,
    )
    return total, number + has_positive if with_self else number


def _check_of_pairs(reduce_fn) -> None:
    """Raises unless `reduce_fn` can reduce the entries of a tile."""
    if reduce_fn is None:
        raise ValueError(
            "reduce_fn=None returns an entry for each pair, which tiles do not store: take "
            "another reduce_fn, or leave out tile"
        )
    try:
        for rows in (2, 3):
            tile = jnp.zeros((rows, 2))
            jax.eval_shape(reduce_fn, tile, tile > 0)
    except (TypeError, ValueError) as error:
        raise ValueError(
            "reduce_fn does not reduce a tile: in tiles, entries of pairs cannot be weighted by "
            "row. Leave out ops.weighted, or tile"
        ) from error


_FORMS: dict[Callable, Callable] = {
    two_views.clip: _clip,
    two_views.siglip: _siglip,
    pairs.ntxent: _ntxent,
    pairs.supcon: _supcon,
    pairs.multi_similarity: _multi_similarity,
    pairs.circle: _circle,
    pairs.contrastive: _contrastive,
    ranking.smooth_ap: _smooth_ap,
    ranking.recall_at_k: _recall_at_k,
}
