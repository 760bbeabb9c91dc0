"""The method `abe` of a config."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import flax.linen as nn
import jax

from dmljax import methods
from dmljax.config.named_methods.choices import Pool, choose, pool_fn_of
from dmljax.methods import base
from dmljax.methods.abe import divergence, drawn_pairs, mean_divergence, min_max, multi_head

__all__ = ["abe"]

_DIVERGENCES = {"sum": divergence, "mean": mean_divergence}
_PAIRS = {"all": None, "drawn": drawn_pairs}
_MASKS = {"sigmoid": jax.nn.sigmoid, "min_max": min_max}


def abe(
    net: nn.Module,
    loss_fn: Callable,
    *,
    classes: int,
    mine_fn: Callable | base.RandomMiner | None = None,
    learners: int = 8,
    dim: int = 512,
    lambda_div: float = 1.0,
    margin_div: float = 1.0,
    divergence_pairs: str = "sum",
    pairs: str = "all",
    heads: bool = False,
    split: Sequence[str] = ("pool3", "4a"),
    attention: str = "4e",
    attention_pools: bool = True,
    mask: str = "sigmoid",
    pool: Pool = "mean",
) -> base.Method:
    """`methods.abe`, or with `heads=True` `methods.abe.multi_head`, the control without attention.

    * `divergence_pairs`: "sum" over the pairs of learners, or their "mean".
    * `pairs`: the loss compares "all" pairs of the batch, or those "drawn" by the sampler.
    * `attention_pools=False`: the attention's copy of the net has no pools, which only `googlenet`
      can leave out.
    * `mask`: "sigmoid" or "min_max". `pool`: "mean", "max", "gem", "mean_max" or "flatten".
    """
    mask_fn = choose("mask", mask, _MASKS)
    divergence_fn = choose("divergence_pairs", divergence_pairs, _DIVERGENCES)
    options = {
        "classes": classes,
        "mine_fn": mine_fn,
        "learners": learners,
        "dim": dim,
        "split": split,
        "pool_fn": pool_fn_of(pool),
        "pairs_fn": choose("pairs", pairs, _PAIRS),
        "lambda_div": lambda_div,
        "divergence_fn": functools.partial(divergence_fn, margin=margin_div),
    }
    if heads:
        return multi_head(net, loss_fn, **options)
    attention_net = None
    if not attention_pools:
        if not hasattr(net, "pools"):
            raise ValueError(
                f"attention_pools=False: {type(net).__name__} has no pools to leave out; take "
                "googlenet"
            )
        attention_net = net.clone(pools=False)
    return methods.abe(
        net,
        loss_fn,
        attention=attention,
        attention_net=attention_net,
        mask_fn=mask_fn,
        **options,
    )
