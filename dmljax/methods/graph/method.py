"""Images of a batch that learn from each other while training (Seidenschwarz et al., ICML 2021).

The backbone's embeddings are the nodes of a graph over the whole batch, wherever its rows lie, and
exchange messages by attention. Two classifiers are trained: one on the backbone's features, one on
what the graph makes of them. The graph is there for training; what is evaluated is the backbone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax

from dmljax import ops
from dmljax.hints import hint
from dmljax.methods import base
from dmljax.methods.graph import nets as graphs
from dmljax.methods.graph.refine import refine
from dmljax.nets import heads as head_kinds

__all__ = ["graph"]

_SIMILARITIES = {"correlation": graphs.correlation, "dot": lambda x: -ops.dot(x, x)}
_POSITIVE = {"rectified": graphs.rectified, "shifted": graphs.shifted}


def graph(
    net: nn.Module,
    loss_fn: Callable,
    *,
    classes: int,
    dim: int | None = 512,
    pool: Any = "max",
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
    """encoder_weight loss_fn(C x, y) + graph_weight loss_fn(D graph(x / |x|), y).

    `x` are the backbone's features, of `dim` numbers; `loss_fn(logits, labels)` is the same for
    both classifiers. Both read features behind a batch norm where they have a `neck`, which the
    encoder then shows as the part "neck". `graph_weight=0` leaves the graph out: "backbone only".

    * `attention`: "dot", "dot_plus_one" (the published code's), "gat", "gatv2", each also as a dict
      with options (`dmljax.nets.attention`), or "none": then images meet in batch norms only. GAT
      and GATv2 have a vector for each head here, and GATv2 two projections; dict(name="gatv2",
      share_vector=True, share_projection=True) is the form with which results were published.
    * `mlp`: "relu", "none", or "identity", which is how the published code leaves it out
      (`nets.graph.MessagePassing`); `layers`, `heads`, `residual`, `norm`, `dropout`, `width` and
      `concat_layers` as in `nets.graph.GraphNetwork`.
    * `threshold`: images hear each other where their weight is above it, instead of all hearing
      all; `weighted`: the weight multiplies the attention. It is the `similarity` ("correlation" or
      "dot") made `positive` ("rectified" or "shifted"). The paper draws such edges, its code leaves
      them unused.

    The graph's own embedding of an image depends on the others of its batch, and batches in the
    order of the test set, class after class, would tell it the labels. `refine` of the method gives
    each image its nearest neighbours instead.
    """
    if not encoder_weight and not graph_weight:
        raise ValueError("encoder_weight and graph_weight are both 0: nothing would be learned")
    similarity_fn = _choose("similarity", similarity, _SIMILARITIES)
    positive_fn = _choose("positive", positive, _POSITIVE)
    output, pool = base.pooling(pool)
    parts = {
        "net": net,
        "head": head_kinds.Head(
            features=dim, pool=pool, classes=classes if encoder_weight else None, neck=neck
        ),
    }
    if graph_weight:
        parts["graph"] = graphs.GraphNetwork(
            classes=classes,
            layers=layers,
            width=width,
            concat_layers=concat_layers,
            neck=graph_neck,
            attention=None if attention == "none" else attention,
            heads=heads,
            mlp=mlp,
            residual=residual,
            norm=norm,
            dropout=dropout,
        )

    def encode(run, batch):
        return run["head"](run["net"](batch["images"])[output], where=batch.get("where"))

    def meet(run, nodes, where=None):
        edges = {}
        if weighted or threshold is not None:
            found = graphs.similarity_graph(
                nodes,
                similarity_fn=similarity_fn,
                positive_fn=positive_fn,
                threshold=threshold,
                where=where,
            )
            edges["adjacency"] = found.adjacency
            if weighted:
                edges["edge_weights"] = found.weights
        return run["graph"](nodes, where=where, **edges)

    def both(run, batch):
        outputs = {"encoder": encode(run, batch)}
        if graph_weight:
            nodes = outputs["encoder"]["embeddings"]
            outputs["graph"] = meet(run, nodes, batch.get("where"))
        return outputs

    whole = base.modules(both, **parts)
    alone = base.modules(encode, net=parts["net"], head=parts["head"])

    def init(key, batch, *, backbone=None):
        params, model_state, _ = whole.init(key, batch)
        return base.with_backbone(params, model_state, backbone)

    def loss(params, model_state, batch, *, key, step):
        del step
        outputs, model_state = whole.apply(params, model_state, batch, train=True, key=key)
        labels, where = batch["labels"], batch.get("where")
        masked = {} if where is None else {"where": where}
        metrics = base.diagnostics(outputs["encoder"]["embeddings"], labels, where=where)
        value = 0.0
        for name, weight in (("encoder", encoder_weight), ("graph", graph_weight)):
            if weight:
                metrics[f"{name}_loss"] = loss_fn(outputs[name]["logits"], labels, **masked)
                value = value + weight * metrics[f"{name}_loss"]
        return value, (model_state, metrics)

    def encoder(params, model_state, images):
        return alone.apply(params, model_state, {"images": images}, train=False)[0]

    def embed(params, model_state, images):
        return encoder(params, model_state, images)["embeddings"]

    def necks(params, model_state, images):
        return {"neck": base.unit_vectors(encoder(params, model_state, images)["neck"])}

    inspect = {"parts": necks} if neck else {}
    if graph_weight:
        among = base.modules(meet, graph=parts["graph"])

        @jax.jit
        def first(params, model_state, nodes):
            def of_one(nodes):
                outputs, _ = among.apply(params, model_state, nodes, train=False)
                return outputs["embeddings"][0]

            return jax.vmap(of_one)(nodes)

        def refined(params, model_state, embeddings, **options):
            return refine(functools.partial(first, params, model_state), embeddings, **options)

        def batch_attention(params, model_state, images):
            outputs, _ = whole.apply(params, model_state, {"images": images}, train=False)
            kinds = ("attention", "attention_2")
            return {kind: outputs["graph"][kind] for kind in kinds if kind in outputs["graph"]}

        inspect |= {"refine": refined, "batch_attention": batch_attention}
    return base.Method(init, loss, embed, inspect=base.Inspect(**inspect))


def _choose(what: str, name: str, known: Mapping[str, Callable]) -> Callable:
    if name not in known:
        raise ValueError(f"there is no {what} {name!r}{hint(name, known)}")
    return known[name]
