"""The methods as a config writes them: every option is a number, a name or a dict.

`dmljax.methods` takes modules and functions. The factories here take the fields of `config.method`,
replace names by functions, and call those. They are the table of names of `config.method.name`. A
method without such fields needs no factory here: it is found in `dmljax.methods`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from dmljax import methods, ops
from dmljax.hints import hint
from dmljax.methods import base
from dmljax.methods.abe import drawn_pairs, min_max, multi_head
from dmljax.methods.abe import losses as abe_losses
from dmljax.methods.dvml import Phase
from dmljax.methods.dvml import losses as dvml_losses
from dmljax.methods.dvml import nets as dvml_nets
from dmljax.methods.graph import nets as graph_nets
from dmljax.nets import pools
from dmljax.train import registry

__all__ = sorted({"abe", "dvml", "graph", "pairs", "proxies", *methods.__all__})


def __getattr__(name: str) -> Any:
    if name in methods.__all__:
        return getattr(methods, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


Pool = str | Mapping[str, Any]
_POOLS: dict[str, Callable | None] = {
    "flatten": pools.flatten,
    "gem": pools.learned_gem,
    "max": pools.global_max,
    "mean": None,  # what the backbone pools itself
    "mean_max": pools.global_mean_max,
}


def _choose(field: str, name: Any, table: Mapping[str, Any]) -> Any:
    if name not in table:
        raise ValueError(f"there is no {field} {name!r}{hint(str(name), table)}")
    return table[name]


def _pool_fn(pool: Pool) -> Callable | None:
    """The function of a pool's name, or of dict(name="gem", p=4.0)."""
    options = dict(pool) if isinstance(pool, Mapping) else {"name": pool}
    name = options.pop("name", None)
    pool_fn = _choose("pool", name, _POOLS)
    known = ("p", "epsilon") if name == "gem" else ()
    if unknown := sorted(set(options) - set(known)):
        message = f"the pool {name!r} has no argument {unknown[0]!r}"
        raise TypeError(message + hint(unknown[0], known))
    return functools.partial(pool_fn, **options) if options else pool_fn


def _with_pool(factory: Callable[..., base.Method]) -> Callable[..., base.Method]:
    """`factory` with the argument `pool`, a name, in place of its argument `pool_fn`."""

    @functools.wraps(factory)
    def named(net, loss_fn, *, pool: Pool = "mean", **options):
        return factory(net, loss_fn, pool_fn=_pool_fn(pool), **options)

    signature = inspect.signature(factory)
    pool = inspect.Parameter("pool", inspect.Parameter.KEYWORD_ONLY, default="mean")
    named.__signature__ = signature.replace(
        parameters=[pool if p.name == "pool_fn" else p for p in signature.parameters.values()]
    )
    return named


pairs = _with_pool(methods.pairs)
proxies = _with_pool(methods.proxies)


# --- abe ----------------------------------------------------------------------------------------

_DIVERGENCES = {"sum": abe_losses.divergence, "mean": abe_losses.mean_divergence}
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
    mask: str = "sigmoid",
    pool: Pool = "mean",
) -> base.Method:
    """`methods.abe`, or with `heads=True` `methods.abe.multi_head`, the control without attention.

    * `divergence_pairs`: "sum" over the pairs of learners, or their "mean".
    * `pairs`: the loss compares "all" pairs of the batch, or those "drawn" by the sampler.
    * `mask`: "sigmoid" or "min_max". `pool`: "mean", "max", "gem", "mean_max" or "flatten".
    """
    mask_fn = _choose("mask", mask, _MASKS)
    divergence_fn = _choose("divergence_pairs", divergence_pairs, _DIVERGENCES)
    options = {
        "classes": classes,
        "mine_fn": mine_fn,
        "learners": learners,
        "dim": dim,
        "split": split,
        "pool_fn": _pool_fn(pool),
        "pairs_fn": _choose("pairs", pairs, _PAIRS),
        "lambda_div": lambda_div,
        "divergence_fn": functools.partial(divergence_fn, margin=margin_div),
    }
    if heads:
        return multi_head(net, loss_fn, **options)
    return methods.abe(net, loss_fn, attention=attention, mask_fn=mask_fn, **options)


# --- graph --------------------------------------------------------------------------------------

_MLPS = {"relu": graph_nets.mlp, "identity": graph_nets.identity, "none": None}
_SIMILARITIES = {"correlation": graph_nets.correlation, "dot": lambda x: -ops.dot(x, x)}
_POSITIVES = {"rectified": graph_nets.rectified, "shifted": graph_nets.shifted}


def graph(
    net: nn.Module,
    loss_fn: Callable,
    *,
    classes: int,
    dim: int | None = 512,
    pool: Pool = "max",
    neck: bool = False,
    layers: int = 1,
    heads: int = 8,
    attention: str | Mapping[str, Any] = "dot",
    mlp: str = "relu",
    residual: bool = True,
    norm: bool = True,
    dropout: float = 0.1,
    width: int | None = None,
    concat_layers: bool = False,
    graph_neck: bool = True,
    encoder_weight: float = 1.0,
    graph_weight: float = 1.0,
    similarity: str = "correlation",
    positive: str = "rectified",
    threshold: float | None = None,
    weighted: bool = False,
) -> base.Method:
    """`methods.graph`, with the options of its network and of its edges as fields.

    * `attention`: "dot", "dot_plus_one" (the published code's), "gat", "gatv2", or a dict with
      options of `dmljax.nets.attention`; "none" leaves it out, then images meet in batch norms
      only. GAT and GATv2 have a vector for each head here, and GATv2 has two projections;
      dict(name="gatv2", share_vector=True, share_projection=True) is the form with which results
      were published.
    * `mlp`: "relu"; "none" leaves out the second step of a block; "identity" leaves out only its
      weights, as the published code does.
    * `layers`, `width`, `concat_layers`, `graph_neck`: of `methods.graph.GraphNetwork`, where the
      last is called `neck`. `residual`, `norm`, `dropout`: of `methods.graph.MessagePassing`.
      `heads` and `dropout` also apply to the attention.
    * `threshold`: a node receives only from nodes whose weight exceeds it. `weighted`: the weight
      multiplies the attention. The weight is the `similarity` ("correlation" or "dot") made
      `positive` ("rectified" or "shifted").
    """
    attention_fn = None
    if attention != "none":
        options = dict(attention) if isinstance(attention, Mapping) else {"name": attention}
        spec = {"heads": heads, "dropout": dropout} | options
        attention_fn = registry.resolve("attention", spec)
    block_fn = functools.partial(
        graph_nets.MessagePassing,
        attention_fn=attention_fn,
        mlp_fn=_choose("mlp", mlp, _MLPS),
        residual=residual,
        norm=norm,
        dropout=dropout,
    )
    network_fn = functools.partial(
        graph_nets.GraphNetwork,
        layers=layers,
        block_fn=block_fn,
        width=width,
        concat_layers=concat_layers,
        neck=graph_neck,
    )
    edges_fn = functools.partial(
        graph_nets.similarity_graph if weighted else graph_nets.similarity_edges,
        similarity_fn=_choose("similarity", similarity, _SIMILARITIES),
        positive_fn=_choose("positive", positive, _POSITIVES),
        threshold=threshold,
    )
    return methods.graph(
        net,
        loss_fn,
        classes=classes,
        dim=dim,
        pool_fn=_pool_fn(pool),
        neck=neck,
        network_fn=network_fn,
        edges_fn=None if threshold is None and not weighted else edges_fn,
        encoder_weight=encoder_weight,
        graph_weight=graph_weight,
    )


# --- dvml ---------------------------------------------------------------------------------------

_NORMS = {"none": (), "shared": dvml_nets.SHARED_NORM, "nested": dvml_nets.NESTED_NORMS}
_ACTIVATIONS = {"tanh": jnp.tanh, "relu": jax.nn.relu}
_FORMS = {
    "norm": dvml_losses.reconstruction_norm,
    "half_sum": dvml_losses.reconstruction_half_sum,
    "mean_square": dvml_losses.reconstruction_mean_square,
}
_RELEASES = {"second": (False, True), "never": (False, False), "always": (True, True)}
# The options that a mode sets where the config does not.
_MODES: dict[str, dict[str, Any]] = {
    "paper": {
        "dim": 512,
        "norms": "none",
        "samples": 20,
        "activation": "tanh",
        "decoder_norm": False,
        "form": "norm",
        "release": "second",
        "decay": 0.0,
        "probe": False,
        "lambdas": ((1, 1, 0.1, 1), (0.8, 1, 0.2, 0.8)),
        "phase_at": 1500,
    },
    "seed": {
        "dim": 128,
        "norms": "nested",
        "samples": 1,
        "activation": "relu",
        "decoder_norm": True,
        "form": "half_sum",
        "release": "never",
        "decay": 5e-3,
        "probe": True,
        "lambdas": ((1, 0.5, 0.5, 1), (0.8, 1, 0.4, 0.8)),
        "phase_at": 1600,
    },
}


def dvml(
    net: nn.Module,
    loss_fn: Callable,
    *,
    classes: int,
    mine_fn: Callable | base.RandomMiner | None = None,
    mode: str = "paper",
    dim: int | None = None,
    pool: Pool = "mean",
    norms: str | None = None,
    samples: int | None = None,
    metric_samples: int = 1,
    reparameterized: bool = True,
    hidden: int = 512,
    activation: str | None = None,
    decoder_norm: bool | None = None,
    form: str | None = None,
    release: str | None = None,
    learn_target: bool = False,
    frozen_decoder: bool = False,
    decay: float | None = None,
    probe: bool | None = None,
    lambdas: Sequence[Sequence[float]] | None = None,
    phase_at: int | None = None,
) -> base.Method:
    """`methods.dvml`; `mode` sets every option that is None.

    * `mode="paper"`: 512 dimensions, 20 samples, tanh in the decoder, no gradient out of the
      decoder in phase 1.
    * `mode="seed"`: the public code for Cars196. 128 dimensions after batch norms
      (`norms="nested"`), one sample, a decoder with relu and a batch norm that uses its running
      statistics in phase 1. No gradient ever leaves the decoder, so nothing separates z_I and z_V.
      A `probe` classifies f; nothing else learns from it.
    * `norms`: "none", "shared" or "nested". `activation`: "tanh" or "relu". `form` of the
      reconstruction loss: "norm", "half_sum" or "mean_square".
    * `release`: the phases in which the gradient of the decoder reaches heads and backbone: the
      "second", "never" or "always".
    * `frozen_decoder=True`: the decoder does not learn in phase 1, as the report of the public
      code says; the code itself trains it.
    """
    overrides = {"dim": dim, "norms": norms, "samples": samples, "activation": activation}
    overrides |= {"decoder_norm": decoder_norm, "form": form, "release": release, "decay": decay}
    overrides |= {"probe": probe, "lambdas": lambdas, "phase_at": phase_at}
    options = dict(_choose("mode", mode, _MODES))
    options |= {name: value for name, value in overrides.items() if value is not None}
    if len(options["lambdas"]) != 2:
        raise ValueError(
            f"lambdas are four weights for phase 1 and four for phase 2, not {options['lambdas']}"
        )
    releases = _choose("release", options["release"], _RELEASES)
    phases = [
        Phase(
            lambdas=options["lambdas"][i],
            release=releases[i],
            train_decoder=i == 1 or not frozen_decoder,
            decoder_statistics=i == 1,
        )
        for i in range(2)
    ]
    return methods.dvml(
        net,
        loss_fn,
        classes=classes,
        mine_fn=mine_fn,
        pool_fn=_pool_fn(pool),
        heads=dvml_nets.VariationalHeads(
            features=options["dim"], norms=_choose("norms", options["norms"], _NORMS)
        ),
        decoder_fn=functools.partial(
            dvml_nets.VariationalDecoder,
            hidden=hidden,
            activation_fn=_choose("activation", options["activation"], _ACTIVATIONS),
            norm=options["decoder_norm"],
        ),
        samples=options["samples"],
        metric_samples=metric_samples,
        reparameterized=reparameterized,
        reconstruction_fn=_choose("form", options["form"], _FORMS),
        learn_target=learn_target,
        phases=phases,
        phase_at=options["phase_at"],
        decay=options["decay"],
        probe=options["probe"],
    )
