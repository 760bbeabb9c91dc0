"""The method `graph` of a config."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn

from dmljax import methods, ops
from dmljax.config import registry
from dmljax.config.named_methods.choices import Pool, choose, pool_fn_of
from dmljax.methods import base
from dmljax.methods.graph import nets

__all__ = ["graph"]

_MLPS = {"relu": nets.mlp, "identity": nets.identity, "none": None}
_SIMILARITIES = {"correlation": nets.correlation, "dot": lambda x: -ops.dot(x, x)}
_POSITIVES = {"rectified": nets.rectified, "shifted": nets.shifted}


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
        nets.MessagePassing,
        attention_fn=attention_fn,
        mlp_fn=choose("mlp", mlp, _MLPS),
        residual=residual,
        norm=norm,
        dropout=dropout,
    )
    network_fn = functools.partial(
        nets.GraphNetwork,
        layers=layers,
        block_fn=block_fn,
        width=width,
        concat_layers=concat_layers,
        neck=graph_neck,
    )
    edges_fn = functools.partial(
        nets.similarity_graph if weighted else nets.similarity_edges,
        similarity_fn=choose("similarity", similarity, _SIMILARITIES),
        positive_fn=choose("positive", positive, _POSITIVES),
        threshold=threshold,
    )
    return methods.graph(
        net,
        loss_fn,
        classes=classes,
        dim=dim,
        pool_fn=pool_fn_of(pool),
        neck=neck,
        network_fn=network_fn,
        edges_fn=None if threshold is None and not weighted else edges_fn,
        encoder_weight=encoder_weight,
        graph_weight=graph_weight,
    )
