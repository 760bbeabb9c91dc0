"""The first steps of losses: check arguments, widen to float32, mask, pair up, mine."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, Integer

from dmljax import ops
from dmljax.ops import Array, Labels, MineFn, Pairs, ReduceFn, ReferenceLabels, Scalar, Triplets
from dmljax.ops.classes import class_rows
from dmljax.ops.fold import Side, Total, fold
from dmljax.ops.masks import check_integers, check_no_names
from dmljax.ops.reductions import total_and_count
from dmljax.ops.types import add_arguments, check_function


class Block(NamedTuple):
    """Some rows of a batch against some columns."""

    rows: Side
    columns: Side
    within_batch: bool  # no row is paired with itself
    known_pairs: Pairs | None = None
    memo: dict | None = None  # keeps the cosines of all pairs, so that they are computed once

    @property
    def pairs(self) -> Pairs:
        if self.known_pairs is not None:
            return self.known_pairs
        return ops.pairs(
            self.rows.labels,
            self.columns.labels,
            ids=self.rows.positions if self.within_batch else None,
            reference_ids=self.columns.positions if self.within_batch else None,
            where=self.rows.where,
            reference_where=self.columns.where,
        )

    def cosines(self) -> Array:
        """Returns the cosine of every row and column: `[r t]`."""
        memo = {} if self.memo is None else self.memo
        if "cosines" not in memo:
            memo["cosines"] = ops.cosine_similarity(self.rows.vectors, self.columns.vectors)
        return memo["cosines"]

    def same_positions(self) -> Array:
        """Marks the pairs of a row and a column with the same index: `[r t]`."""
        return self.rows.positions[:, None] == self.columns.positions[None, :]


class Batch(NamedTuple):
    """The checked arguments of a loss: anchors in rows, references in columns.

    Losses against proxies have a class in each row, and an embedding in each column.
    """

    rows: Side
    columns: Side  # the same object as `rows` if the batch is compared with itself
    mined: Pairs | Triplets | None = None  # None: pairs follow from the labels of the sides
    labels: Any = None
    reduce_fn: ReduceFn | None = None
    tile: int | None = None
    has_whole_columns: bool = False  # see `ops.fold`
    memo: dict | None = None  # see `Block`

    @property
    def anchors(self) -> Array:
        return self.rows.vectors

    @property
    def references(self) -> Array:
        return self.columns.vectors

    @property
    def where(self) -> Array:
        return self.rows.where

    @property
    def within_batch(self) -> bool:
        return self.columns is self.rows

    @property
    def pairs(self) -> Pairs:
        assert self.mined is not None
        return ops.triplets_to_pairs(self.mined)

    def cosines(self) -> Array:
        """Returns the cosine of every anchor and reference: `[b n]`."""
        return ops.cosine_similarity(self.anchors, self.references)

    def reduce(self, entries: Array, where: Array) -> Array:
        """Reduces entries, as the caller of the loss wants it."""
        return ops.reduce(self.reduce_fn, entries, where)

    def fold(
        self, terms_fn: Callable, *params: Any, of_rows: Any = None, of_columns: Any = None
    ) -> tuple:
        """Returns the sums of `terms_fn(block, *params)` over all pairs, see `ops.fold`.

        `of_rows` are arrays `[b ...]` that become `block.rows.extra`, and so are `of_columns`.
        """
        if not (self.tile is None or (type(self.tile) is int and self.tile > 0)):
            raise ValueError(f"tile must be a positive integer or None, got {self.tile!r}")
        within_batch, rows, columns = self.within_batch, self.rows, self.columns
        pairs, memo = None if self.mined is None else self.pairs, self.memo

        def terms(rows, columns, *params):
            return terms_fn(Block(rows, columns, within_batch, pairs, memo), *params)

        if of_rows is not None:
            rows = rows._replace(extra=of_rows)
        if of_columns is not None:
            columns = columns._replace(extra=of_columns)
        whole = self.has_whole_columns
        return fold(terms, rows, columns, *params, tile=self.tile, has_whole_columns=whole)

    def reduce_pairs(
        self, entries_fn: Callable, *params: Any, of_rows: Any = None
    ) -> tuple[Array, ...]:
        """Reduces entries of pairs: each `(entries, where)` of `entries_fn(block, *params)`."""
        if self.reduce_fn is None:
            if self.tile is not None:
                raise ValueError(
                    "reduce_fn=None returns an entry for each pair, which tiles do not store: give "
                    "another reduce_fn, or leave out tile"
                )
            rows = self.rows._replace(extra=of_rows)
            block = Block(rows, self.columns, self.within_batch, self.pairs, self.memo)
            return tuple(jnp.where(where, x, 0) for x, where in entries_fn(block, *params))

        def terms(block, *params):
            for entries, where in entries_fn(block, *params):
                yield from map(Total, total_and_count(self.reduce_fn, entries, where))

        sums = self.fold(terms, *params, of_rows=of_rows)
        return tuple(ops.divide(*pair) for pair in zip(sums[::2], sums[1::2], strict=True))


def prepare(
    embeddings: Float[Array, "b d"],
    labels: Labels,
    *,
    reduce_fn: ReduceFn | None = ops.mean,
    references: Float[Array, "n d"] | None = None,
    reference_labels: ReferenceLabels | None = None,
    where: Bool[Array, "b"] | None = None,
    mine_fn: MineFn | None = None,
    tile: int | None = None,
) -> Batch:
    """Checks the arguments that pair losses share and turns them into a `Batch`.

    Arguments of all pair losses:

    labels: Classes of the rows: int `[b]`; or multi-hot bool `[b c]`, where rows that share a
        class are positives; or `ops.Pairs`, the masks of positives and negatives.
    distance_fn: The distance that the loss measures, `distance_fn(x [b d], y [n d]) -> [b n]`.
        `ops.unit_euclidean`, `ops.cosine` and `ops.unit(...)` normalize embeddings;
        `ops.euclidean`, `ops.squared_euclidean` and `ops.dot` do not.
    reduce_fn: Turns the entries into one number: `ops.mean`, `ops.mean_of_active`, `ops.sum`,
        `ops.threshold(...)`, `ops.weighted(...)`. None returns the entries, 0 where they do not
        count.
    references: Rows to compare the anchors with. By default the batch itself, without the pair
        of a row with itself. References that contain the batch, such as those of
        `jax.lax.all_gather`, count each row as its own positive: give `ops.pairs(labels,
        reference_labels, ids=..., reference_ids=...)` as labels, which excludes equal ids.
    reference_labels: Classes of `references`, in the form of `labels`.
    where: Rows that count. Masking a row equals dropping it.
    mine_fn: A miner, `mine_fn(distances, pairs)`, that selects pairs or triplets: see
        `dmljax.miners`. It reads Euclidean distances of unit embeddings, whatever the loss
        itself measures.
    tile: The size of a tile, such as 1024, or 4096 on accelerators: the same loss without a matrix
        of all pairs, for large batches. It needs labels that are not `ops.Pairs`, no miner, and for
        entries of pairs a reduction without weights. None compares all pairs at once. Only some
        losses have this argument.
    """
    if tile is not None and (mine_fn is not None or isinstance(labels, Pairs)):
        cause = "a miner" if mine_fn is not None else "ops.Pairs as labels, such as of a memory,"
        raise ValueError(
            f"{cause} needs all pairs at once, and tile={tile} compares rows by their classes: "
            "leave out one of the two"
        )
    sides = _sides(embeddings, labels, references, reference_labels, where)
    anchors, references, where = sides
    within_batch = references is anchors
    if tile is not None:
        rows = columns = _side(anchors, labels, where)
        if not within_batch:
            columns = _side(references, reference_labels, jnp.ones(len(references), bool))
        return Batch(rows, columns, None, labels, reduce_fn, tile)
    pairs: Pairs | Triplets
    if isinstance(labels, Pairs) and not within_batch:
        pairs = Pairs(*(jnp.asarray(mask) & jnp.asarray(where)[:, None] for mask in labels))
    else:
        pairs = ops.pairs(labels, reference_labels, where=where)
    if mine_fn is not None:
        check_function("mine_fn", mine_fn, "miners.semihard_triplets")
        pairs = mine_fn(jax.lax.stop_gradient(ops.unit_euclidean(anchors, references)), pairs)
    rows = columns = Side(anchors, None, where, None)
    if not within_batch:
        columns = Side(references, None, None, None)
    return Batch(rows, columns, pairs, labels, reduce_fn, memo={})


def prepare_views(
    embeddings: Float[Array, "b d"],
    other: Float[Array, "b d"],
    *,
    reduce_fn: ReduceFn | None = ops.mean,
    where: Bool[Array, "b"] | None = None,
    tile: int | None = None,
) -> Batch:
    """Checks two views of a batch and turns them into a `Batch`.

    Arguments of all losses of two views (`vicreg` has neither `reduce_fn` nor `tile`):

    other: Row i is the other view, or modality, of row i of `embeddings`. It gets gradients.
    reduce_fn: Turns the entries into one number: `ops.mean`, `ops.mean_of_active`, `ops.sum`,
        `ops.threshold(...)`, `ops.weighted(...)`. None returns the entries, 0 where they do not
        count.
    where: Rows that count, on both sides. Masking a row equals dropping it.
    tile: The size of a tile, such as 1024, or 4096 on accelerators: the same loss without a matrix
        of all pairs, for large batches. None compares all pairs at once.
    """
    x, y = matrix("embeddings", embeddings), matrix("other", other)
    if x.shape != y.shape:
        raise ValueError(f"embeddings {x.shape} and other {y.shape} must have the same shape")
    where = row_mask(where, x)
    labels = jnp.arange(len(x), dtype=jnp.int32)
    rows, columns = (_side(jnp.where(where[:, None], v, 0), labels, where) for v in (x, y))
    return Batch(rows, columns, reduce_fn=reduce_fn, tile=tile)


def prepare_proxies(
    embeddings: Float[Array, "b d"],
    labels: Integer[Array, "b"],
    proxies: Float[Array, "..."],
    *,
    axes: str = "c d",
    reduce_fn: ReduceFn | None = ops.mean,
    where: Bool[Array, "b"] | None = None,
    tiles: ops.ClassTiles | None = None,
) -> Batch:
    """Checks the arguments that losses against proxies share and turns them into a `Batch`.

    Arguments of all losses against proxies:

    labels: Classes of the rows, from 0 to c - 1. Another label raises, or gives NaN inside `jit`,
        where its value is unknown.
    proxies: One learned vector per class, or k of them: parameters, trained with the net.
    reduce_fn: Turns the entries into one number: `ops.mean`, `ops.mean_of_active`, `ops.sum`,
        `ops.threshold(...)`, `ops.weighted(...)`. None returns the entries, 0 where they do not
        count.
    where: Rows that count. Masking a row equals dropping it, whatever its label.
    tiles: For very many classes, `ops.ClassTiles(size)`: `size` classes at a time, or a random
        sample of them. None computes all logits at once.
    """
    x, proxies = matrix("embeddings", embeddings), jnp.asarray(proxies)
    width, ndim = x.shape[1], len(axes.split())
    if proxies.ndim != ndim or 0 in proxies.shape or proxies.shape[-1] != width:
        advice = ""
        if proxies.ndim in (2, 3) and proxies.ndim != ndim:
            centers = 10 if proxies.ndim == 2 else 0
            advice = f": with the method proxies of a config, --config.method.centers={centers}"
        raise ValueError(
            f"proxies must be [{axes}] with d = {width} as the embeddings have, not of shape "
            f"{proxies.shape}{advice}"
        )
    if not jnp.issubdtype(proxies.dtype, jnp.floating):
        raise ValueError(f"proxies must be floats, not {proxies.dtype}")
    vectors, classes_of_rows, counted = mask_rows(x, labels, len(proxies), where)
    classes, tile = class_rows(ops.widen(proxies), classes_of_rows, tiles)
    columns = Side(vectors, classes_of_rows, counted, classes_of_rows)
    return Batch(classes, columns, None, classes_of_rows, reduce_fn, tile, has_whole_columns=True)


def prepare_vectors(
    x: Float[Array, "*n d"],
    *,
    reduce_fn: ReduceFn | None = ops.mean,
    where: Bool[Array, "*n"] | None = None,
) -> Batch:
    """Checks vectors and turns them into the rows of a `Batch`.

    Arguments of all regularizers:

    x: Vectors along the last axis: embeddings `[b d]`, or proxies `[c d]` or `[c k d]`.
    reduce_fn: Turns the entries into one number, such as `ops.mean` or `ops.sum`. None returns the
        entries, 0 where they do not count.
    where: Vectors that count. Masking a vector equals dropping it.
    """
    x = jnp.asarray(x)
    if where is not None and np.shape(where) != x.shape[:-1]:
        raise ValueError(f"where must be bool {list(x.shape[:-1])}, not {list(np.shape(where))}")
    x = matrix("x", x.reshape(-1, x.shape[-1]) if x.ndim > 2 else x)
    where = row_mask(None if where is None else jnp.reshape(where, -1), x)
    rows = Side(jnp.where(where[:, None], x, 0), None, where, None)
    return Batch(rows, rows, reduce_fn=reduce_fn)


def pair_loss(reduce_fn: ReduceFn, *, in_tiles: bool = False) -> Callable:
    """Makes a loss of pairs. `in_tiles` formulas only use `fold` and `reduce_pairs`; see `loss_of`.

    They take a `tile`.
    """
    return loss_of(prepare, without=() if in_tiles else ("tile",), reduce_fn=reduce_fn)


def proxy_loss(axes: str) -> Callable:
    """Makes a loss against proxies that have these axes; see `loss_of`."""
    return loss_of(prepare_proxies, without=("axes",), axes=axes)


def loss_of(prepare_fn: Callable, *, without: Sequence[str] = (), **bound: Any) -> Callable:
    """Makes a loss `f(arrays, *, ...)` of its formula `f(batch, *, ...)`; `prepare_fn` checks them.

    The loss has the signatures and docstrings of both, except the arguments `without`. `bound` are
    defaults of `prepare_fn`.
    """
    return functools.partial(_loss_of, prepare_fn=prepare_fn, without=without, bound=bound)


def _loss_of(
    formula: Callable, *, prepare_fn: Callable, without: Sequence[str], bound: dict[str, Any]
) -> Callable[..., Any]:
    taken = inspect.signature(prepare_fn).parameters.values()
    shared = {
        p.name: p.replace(default=bound.get(p.name, p.default))
        for p in taken
        if p.name not in without
    }
    if "axes" in bound:
        shared["proxies"] = shared["proxies"].replace(annotation=Float[Array, bound["axes"]])

    @functools.wraps(formula)
    def loss(*arrays: Any, **keywords: Any) -> Any:
        options = {name: keywords.pop(name) for name in [*keywords] if name in shared}
        return formula(prepare_fn(*arrays, **{**bound, **options}), **keywords)

    _, *own = inspect.signature(formula).parameters.values()
    by_keyword = inspect.Parameter.KEYWORD_ONLY
    arrays = [p for p in shared.values() if p.kind is not by_keyword]
    options = [p for p in shared.values() if p.kind is by_keyword]
    loss.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [*arrays, *own, *options], return_annotation=inspect.signature(formula).return_annotation
    )
    add_arguments(loss, prepare_fn)
    return loss


def _side(vectors: Array, labels: Any, where: Array) -> Side:
    return Side(vectors, jnp.asarray(labels), where, jnp.arange(len(vectors), dtype=jnp.int32))


def _sides(
    embeddings: Array, labels, references: Array | None, reference_labels, where: Array | None
) -> tuple[Array, Array, Array]:
    """Returns the anchors, the references and the mask of the anchors, checked.

    The references are the same object as the anchors if the batch is compared with itself.
    """
    anchors = matrix("embeddings", embeddings)
    where = row_mask(where, anchors)
    within_batch = references is None
    if (reference_labels is None) != (within_batch or isinstance(labels, Pairs)):
        raise ValueError("references need reference_labels, or ops.Pairs as labels: give one")
    references = anchors if references is None else matrix("references", references)
    if anchors.shape[1] != references.shape[1]:
        raise ValueError(
            f"embeddings {anchors.shape} and references {references.shape} differ in their last "
            "axis"
        )
    _check_pair_labels(labels, reference_labels, anchors, references, within_batch)
    # A row that does not count may hold anything, even NaN. Zeros keep it out of every sum.
    anchors = jnp.where(where[:, None], anchors, 0)
    return anchors, anchors if within_batch else references, where


def matrix(name: str, x: Array) -> jax.Array:
    """Converts `x` to float32 or wider. Raises unless it is a non-empty matrix of floats."""
    x = jnp.asarray(x)
    if x.ndim != 2 or 0 in x.shape:
        raise ValueError(f"{name} must be a non-empty matrix [rows d], not of shape {x.shape}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{name} must be floats, not {x.dtype}: convert with astype('float32')")
    return ops.widen(x)


def row_mask(where: Array | None, x: Array) -> jax.Array:
    """Returns the mask of the rows of `x` that count: `where`, or all rows without it."""
    if where is None:
        return jnp.ones(len(x), bool)
    where = jnp.asarray(where)
    if where.shape != x.shape[:1] or where.dtype != jnp.bool_:
        raise ValueError(f"where must be bool [{len(x)}], not {where.dtype} {list(where.shape)}")
    return where


def check_class_labels(labels, x: Array) -> None:
    """Raises unless `labels` has one integer for each row of `x`."""
    check_no_names("labels", labels)
    shape, dtype = np.shape(labels), jnp.asarray(labels).dtype
    if shape != x.shape[:1] or not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(f"labels must be int [{len(x)}], not {dtype} {list(shape)}")


def mask_rows(x: Array, labels, classes: int, where) -> tuple[Array, Array, Array]:
    """Returns `x` with 0 and `labels` with -1 in rows that do not count, and those that count."""
    check_class_labels(labels, x)
    counts = row_mask(where, x)
    _check_range(labels, classes, where)
    labels = jnp.asarray(labels)
    is_class = (labels >= 0) & (labels < classes)
    # Inside `jit` a label out of range cannot raise, so its row becomes NaN.
    x = jnp.where(is_class[:, None], x, jnp.nan)
    return jnp.where(counts[:, None], x, 0), jnp.where(counts, labels, -1), counts


def _check_range(labels, classes: int, where) -> None:
    if isinstance(labels, jax.core.Tracer) or isinstance(where, jax.core.Tracer):
        return
    labels, where = jax.device_get((labels, where))
    labels = np.asarray(labels)
    wrong = (labels < 0) | (labels >= classes)
    rows = np.flatnonzero(wrong if where is None else wrong & where)
    if rows.size:
        raise ValueError(
            f"label {labels[rows[0]]} in row {rows[0]} is none of the {classes} classes, which are "
            f"0 to {classes - 1}"
        )


def radians(degrees: Scalar) -> Scalar:
    """Converts degrees to radians: a number in double precision for a number, else an array."""
    return np.deg2rad(degrees) if isinstance(degrees, int | float) else jnp.deg2rad(degrees)


def _check_pair_labels(labels, reference_labels, anchors, references, within_batch: bool) -> None:
    if isinstance(labels, Pairs):
        for name, mask in zip(Pairs._fields, labels, strict=True):
            if np.shape(mask) != (len(anchors), len(references)):
                raise ValueError(
                    f"Pairs.{name} must be bool [{len(anchors)} {len(references)}] for these "
                    f"embeddings and references, not {list(np.shape(mask))}"
                )
        return
    _check_one_label_per_row("labels", labels, len(anchors))
    if within_batch:
        return
    _check_one_label_per_row("reference_labels", reference_labels, len(references))
    if np.shape(labels)[1:] != np.shape(reference_labels)[1:]:
        raise ValueError(
            f"labels {list(np.shape(labels))} and reference_labels "
            f"{list(np.shape(reference_labels))} differ in their number of classes"
        )


def _check_one_label_per_row(name: str, labels, rows: int) -> None:
    check_integers(name, labels)
    shape, dtype = np.shape(labels), jnp.asarray(labels).dtype
    is_form = jnp.issubdtype(dtype, jnp.integer) if len(shape) == 1 else dtype == jnp.bool_
    if len(shape) not in (1, 2) or shape[0] != rows or not is_form:
        raise ValueError(
            f"{name} must be int [{rows}], bool multi-hot [{rows} c] or ops.Pairs, not {dtype} "
            f"{list(shape)}"
        )
