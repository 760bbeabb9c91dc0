"""`Method`, a tuple of pure functions, and what the losses of all methods share.

A factory is called as `factory(net, loss_fn, *, classes, ...)`. `net` is a backbone (a Linen module
of `dmljax.nets`), `loss_fn` is a loss with its hyper-parameters bound, and `classes` is the number
of training classes. All other arguments are hyper-parameters of the method, with defaults.

A `batch` is `{"images": [b h w c] normalized, "labels": [b]}`. `params` and `model_state` are plain
trees of arrays. The backbone, or the module that contains it, is `params["net"]`, and its running
statistics are `model_state["batch_stats"]["net"]`.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from dmljax import losses
from dmljax.losses.combinators import check_prefixes
from dmljax.methods.assemble import Modules
from dmljax.ops import Array, MineFn

__all__ = [
    "Inspect",
    "Method",
    "RandomMiner",
    "SplitLoss",
    "accepts",
    "diagnostics",
    "split_loss",
    "with_miner",
    "with_params",
    "with_prefixes",
]

_DIAGNOSED_ROWS = 1024
Variables = Mapping[str, Any]
LossAndState = tuple[Array, tuple[Variables, dict[str, Array]]]


class SplitLoss(NamedTuple):
    """The loss of a method as two functions, for batches that are embedded in chunks.

    Only for methods in which a row of the outputs depends only on its own image (apart from batch
    norm): then `forward` may run chunk by chunk, and `criterion` sees the outputs of all chunks.

    * `forward(params, model_state, images, *, key) -> (outputs {name: [b ...]}, model_state)`
    * `criterion(params, model_state, outputs, batch, *, key, step)
      -> (loss, (model_state, metrics))`
    """

    forward: Callable[..., tuple[dict[str, Array], Variables]]
    criterion: Callable[..., LossAndState]


class Inspect(NamedTuple):
    """What goes on inside a method, as named arrays. One optional function for each kind.

    All are pure, and all but `refine` take `(params, model_state, images)`:

    * `parts -> {name: [b d]}`: embeddings that are scored besides the main one (the learners of an
      ensemble).
    * `spatial_masks -> {name: [b m h w c]}`: masks of m learners over feature maps.
    * `batch_attention -> {name: [layers heads b b]}`: attention among the images of a batch; rows
      receive, columns send.
    * `synthetic_features(..., *, key) -> {name: [b d]}`: vectors of a generative method: "features"
      of the backbone and their "reconstruction"; the embedding "z_invariant", a sample of
      "z_variant", and "synthetic", the sum of both.
    * `refine(params, model_state, embeddings [n d], *, query, gallery) -> [n e]`: embeddings of a
      split, refined by each other at test time. `query` and `gallery` are bool `[n]` or None;
      arrays are numpy's.
    """

    parts: Callable[..., dict[str, Array]] | None = None
    refine: Callable[..., Any] | None = None
    spatial_masks: Callable[..., dict[str, Array]] | None = None
    batch_attention: Callable[..., dict[str, Array]] | None = None
    synthetic_features: Callable[..., dict[str, Array]] | None = None


class Method(NamedTuple):
    """A method: three pure functions, two optional views of them, and paths of its parameters.

    * `init(key, batch, *, backbone=None) -> (params, model_state)`. `backbone` holds the variables
      of a pretrained backbone, `{"params": ..., "batch_stats": ...}`; they replace the drawn ones.
    * `loss(params, model_state, batch, *, key, step) -> (loss, (model_state, metrics))`
    * `embed(params, model_state, images) -> embeddings [b d]`, unit vectors unless the method
      says otherwise.
    * `split_loss`: the same loss in two steps, see `SplitLoss`.
    * `inspect`: what goes on inside, see `Inspect`.
    * `backbone`: the parameters that `init` takes from `backbone`, as paths such as 'net' or
      'net/shared', with everything below them.
    * `prefixes`: ascending widths. For each of them, the first numbers of an embedding, normalized,
      are an embedding that was trained, too.
    * `per_class`: the parameters that have a row or a column for each class, as such paths. A run
      that starts from another one draws them, because it has other classes. With a `split_loss`,
      `runtime.sharded` splits those with rows by classes. () for none; None: the method does not
      say.
    """

    init: Callable[..., tuple[Variables, Variables]]
    loss: Callable[..., LossAndState]
    embed: Callable[..., Array]
    split_loss: SplitLoss | None = None
    inspect: Inspect | None = None
    backbone: tuple[str, ...] = ("net",)
    per_class: tuple[str, ...] | None = None
    prefixes: tuple[int, ...] = ()


class RandomMiner(NamedTuple):
    """Marks a miner that draws: `mine_fn(distances, pairs, *, key)`.

    Methods take it where they take a miner, and give it a key of their own at every step.
    """

    mine_fn: Callable


def with_miner(loss_fn: Callable, mine_fn: MineFn | RandomMiner | None) -> Callable:
    """Returns `loss_fn(embeddings, labels, *, key, step, ...)` with the miner bound.

    Loss and miner get the `step` if they have an argument of this name. Only a `RandomMiner` gets
    the `key`.
    """
    if mine_fn is not None and not accepts(loss_fn, "mine_fn"):
        raise ValueError(
            "the loss takes no miner, as it has no argument mine_fn: leave out the miner"
        )

    is_random = isinstance(mine_fn, RandomMiner)
    miner = mine_fn.mine_fn if isinstance(mine_fn, RandomMiner) else mine_fn
    miner = None if miner is None else with_step(miner)
    loss_fn = with_step(loss_fn)

    def mined_loss(*args, key, step=None, **kwargs):
        if miner is not None:
            draws = {"key": key} if is_random else {}
            kwargs["mine_fn"] = functools.partial(miner, step=step, **draws)
        return loss_fn(*args, step=step, **kwargs)

    return mined_loss


def with_step(function: Callable) -> Callable:
    """Returns `function(..., step)`, which passes `step` on if `function` has such an argument."""
    takes_step = _has(function, "step")

    def stepped(*args, step, **kwargs):
        if takes_step and step is None:
            raise TypeError("the loss or the miner takes step: the method must pass it on")
        return function(*args, **({"step": step} if takes_step else {}), **kwargs)

    return stepped


def accepts(function: Callable, keyword: str) -> bool:
    """Returns whether a function has an argument of this name, or accepts any keyword."""
    parameters = inspect.signature(function).parameters
    return _has(function, keyword) or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _has(function: Callable, keyword: str) -> bool:
    return keyword in inspect.signature(function).parameters


def with_prefixes(loss_fn: Callable, prefixes: Sequence[int]) -> Callable:
    """Sums `loss_fn` over prefixes and the whole width (`losses.prefixes`)."""
    if not prefixes:
        return loss_fn
    check_prefixes(prefixes)

    @functools.wraps(loss_fn)
    def loss(embeddings, *args, **kwargs):
        width = embeddings.shape[1]
        dims = (*prefixes, width) if prefixes[-1] < width else prefixes
        return losses.prefixes(loss_fn, dims=dims)(embeddings, *args, **kwargs)

    return loss


def with_params(method: Method, params_fn: Callable[[Any], Any]) -> Method:
    """Returns `method` for parameters from which `params_fn` computes its own.

    `init` still returns the parameters of `method`.
    """

    def of_params(fn):
        return fn and (lambda params, *args, **kwargs: fn(params_fn(params), *args, **kwargs))

    return method._replace(
        loss=of_params(method.loss),
        embed=of_params(method.embed),
        split_loss=method.split_loss and SplitLoss(*map(of_params, method.split_loss)),
        inspect=method.inspect and Inspect(*map(of_params, method.inspect)),
    )


def split_loss(net: Modules, criterion: Callable) -> tuple[Callable, SplitLoss]:
    """Builds the `loss` and the `split_loss` of a method: first `net`, then `criterion`.

    `criterion` is as in `SplitLoss`. It sees the outputs "embeddings" and "features" of `net`.
    """

    def forward(params, model_state, images, *, key):
        outputs, model_state = net.apply(params, model_state, images, train=True, key=key)
        return {name: outputs[name] for name in ("embeddings", "features")}, model_state

    def loss(params, model_state, batch, *, key, step):
        outputs, model_state = forward(params, model_state, batch["images"], key=key)
        return criterion(params, model_state, outputs, batch, key=key, step=step)

    return loss, SplitLoss(forward, criterion)


def diagnostics(
    embeddings: Array, labels: Array, *, where: Array | None = None
) -> dict[str, Array]:
    """Numbers that tell a collapsed loss from a solved one (`losses.stats`), without gradients.

    They are computed on the first 1,024 rows at most, to bound memory.
    """
    rows = slice(_DIAGNOSED_ROWS) if len(embeddings) > _DIAGNOSED_ROWS else slice(None)
    where = None if where is None else where[rows]
    numbers = losses.stats(embeddings[rows], labels[rows], where=where)
    return {name: jax.lax.stop_gradient(number) for name, number in numbers.items()}
