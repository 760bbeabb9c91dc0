"""Attention over the batch (Seidenschwarz et al., ICML 2021): images learn from each other.

The embeddings of the backbone are the nodes of a graph over the whole global batch, and exchange
messages by attention. Two classifiers are trained: one on the features of the backbone, one on the
output of the graph network. Evaluation uses only the backbone, unless embeddings are refined among
their nearest neighbors (`refine`).
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from dmljax import ops, retrieval
from dmljax.methods import assemble, base
from dmljax.methods.graph_nets import (
    Graph,
    GraphNetwork,
    MessagePassing,
    mlp,
    similarity_edges,
    similarity_graph,
)
from dmljax.nets import pools
from dmljax.nets.attention import dot
from dmljax.nets.heads import Head

__all__ = ["GraphNetwork", "MessagePassing", "graph", "similarity_edges", "similarity_graph"]


def graph(
    net: nn.Module,
    loss_fn: Callable,
    *,
    classes: int,
    dim: int | None = 512,
    pool_fn: Callable | None = pools.global_max,
    neck: bool = False,
    layers: int = 1,
    heads: int = 8,
    attention_fn: Callable[..., nn.Module] | None = dot,
    mlp_fn: Callable | None = mlp,
    residual: bool = True,
    norm: bool = True,
    dropout: float = 0.1,
    width: int | None = None,
    concat_layers: bool = False,
    graph_neck: bool = True,
    edges_fn: Callable[..., Graph] | None = None,
    encoder_weight: float = 1.0,
    graph_weight: float = 1.0,
) -> base.Method:
    """Builds the loss encoder_weight loss_fn(C x, y) + graph_weight loss_fn(D network(x / |x|), y).

    (Seidenschwarz et al., ICML 2021.) x are the features of the backbone, C and D are the two
    classifiers, and `loss_fn(logits, labels)` is the same for both.

    * `dim`: width of the features; None takes the pooled ones. `pool_fn`: see `assemble.encoder`.
    * `neck`: C reads the features after a batch norm. These are then scored as the part "neck".
    * `layers`, `width`, `concat_layers`, `graph_neck`: of the `GraphNetwork`, which calls the last
      one `neck`. `mlp_fn`, `residual`, `norm`, `dropout`: of its `MessagePassing` blocks.
    * `attention_fn`: a function of `dmljax.nets.attention`; `heads` and `dropout` apply to it
      unless it has its own. None leaves it out; then images meet in batch norms only. The default
      options of `gat` and `gatv2` are the equations of their papers. The published results have
      dict(name="gatv2", sublayers=2, share_vector=True, share_projection=True).
    * `edges_fn(nodes, *, where) -> Graph`: who receives from whom, and how strongly. None: everyone
      from everyone. The paper draws edges by `similarity_graph`; its code never uses them.
    * `graph_weight=0` leaves the graph out ("backbone only"), `encoder_weight=0` leaves out C.

    The output of the network for an image depends on the rest of the batch. If the batches of a
    test set followed its order, class by class, the output would depend on the labels. Therefore
    `Inspect.refine` gives the network every image together with its nearest neighbors.
    """
    if not encoder_weight and not graph_weight:
        raise ValueError("encoder_weight and graph_weight are both 0: nothing would be learned")
    output, pool_fn = assemble.pooling(pool_fn)
    linen = {
        "net": net,
        "head": Head(
            features=dim, pool_fn=pool_fn, classes=classes if encoder_weight else None, neck=neck
        ),
    }
    if graph_weight:
        if attention_fn is not None:
            options = {"heads": heads, "dropout": dropout} | getattr(attention_fn, "keywords", {})
            attention_fn = functools.partial(attention_fn, **options)
        linen["graph"] = GraphNetwork(
            classes=classes,
            layers=layers,
            block_fn=functools.partial(
                MessagePassing,
                attention_fn=attention_fn,
                mlp_fn=mlp_fn,
                residual=residual,
                norm=norm,
                dropout=dropout,
            ),
            width=width,
            concat_layers=concat_layers,
            neck=graph_neck,
        )

    def run_encoder(run, batch):
        features = assemble.output_of(run["net"](batch["images"]), output)
        return run["head"](features, where=batch.get("where"))

    def run_graph(run, nodes, where=None):
        edges = {}
        if edges_fn is not None:
            batch_graph = edges_fn(nodes, where=where)
            edges["adjacency"] = batch_graph.adjacency
            if batch_graph.weights is not None:
                edges["edge_weights"] = batch_graph.weights
        return run["graph"](nodes, where=where, **edges)

    def run_all(run, batch):
        outputs = {"encoder": run_encoder(run, batch)}
        if graph_weight:
            nodes = outputs["encoder"]["embeddings"]
            outputs["graph"] = run_graph(run, nodes, batch.get("where"))
        return outputs

    stepped_loss = base.with_miner(loss_fn, None)
    all_modules = assemble.modules(run_all, **linen)
    encoder = assemble.modules(run_encoder, net=linen["net"], head=linen["head"])

    def init(key, batch, *, backbone=None):
        params, model_state, _ = all_modules.init(key, batch)
        return assemble.with_backbone(params, model_state, backbone)

    def loss(params, model_state, batch, *, key, step):
        outputs, model_state = all_modules.apply(params, model_state, batch, train=True, key=key)
        labels, where = batch["labels"], batch.get("where")
        mask = {} if where is None else {"where": where}
        metrics = base.diagnostics(outputs["encoder"]["embeddings"], labels, where=where)
        value = 0.0
        for name, weight in (("encoder", encoder_weight), ("graph", graph_weight)):
            if weight:
                metrics[f"{name}_loss"] = stepped_loss(
                    outputs[name]["logits"], labels, key=key, step=step, **mask
                )
                value = value + weight * metrics[f"{name}_loss"]
        return value, (model_state, metrics)

    def encode(params, model_state, images):
        return encoder.apply(params, model_state, {"images": images}, train=False)[0]

    def embed(params, model_state, images):
        return encode(params, model_state, images)["embeddings"]

    def parts(params, model_state, images):
        return {"neck": ops.normalize(encode(params, model_state, images)["neck"])}

    inspect = base.Inspect(parts=parts if neck else None)
    method = base.Method(init, loss, embed, inspect=inspect, per_class=("head/fc", "graph/fc"))
    if not graph_weight:
        return method

    network = assemble.modules(run_graph, graph=linen["graph"])

    @jax.jit
    def refine_first(params, model_state, neighborhoods):
        def refine_one(nodes):
            outputs, _ = network.apply(params, model_state, nodes, train=False)
            return outputs["embeddings"][0]

        return jax.vmap(refine_one)(neighborhoods)

    def refine_split(params, model_state, embeddings, **options):
        first_fn = functools.partial(refine_first, params, model_state)
        return refine(first_fn, embeddings, **options)

    def batch_attention(params, model_state, images):
        outputs, _ = all_modules.apply(params, model_state, {"images": images}, train=False)
        maps = outputs["graph"]
        return {name: maps[name] for name in ("attention", "attention_2") if name in maps}

    inspect = inspect._replace(refine=refine_split, batch_attention=batch_attention)
    return method._replace(inspect=inspect)


def refine(
    first_fn: Callable,
    embeddings: np.ndarray,
    *,
    query: np.ndarray | None = None,
    gallery: np.ndarray | None = None,
    rows: int = 256,
    **neighborhood: Any,
) -> np.ndarray:
    """Refines embeddings `[n e]`: passes each through `first_fn` with its k-reciprocal neighbors.

    (Seidenschwarz et al., ICML 2021.) No label is used. Rows of NaN, the embeddings of images that
    could not be read, stay NaN.

    * `first_fn(neighborhoods [m batch_size d]) -> [m e]` returns the output for the first node of
      every neighborhood. It gets `rows` neighborhoods at a time.
    * `query`, `gallery` (bool `[n]`): queries are refined by embeddings of the gallery, which stay
      as they are. Without them all embeddings refine each other.
    * `neighborhood`: `k` and `batch_size` of `retrieval.k_reciprocal`. Their defaults are as
      published.
    """
    x = np.asarray(embeddings, np.float32)
    readable = np.isfinite(x).all(axis=1)
    if query is None and gallery is None:
        query_rows = np.flatnonzero(readable)
        near = retrieval.k_reciprocal(x[query_rows], **neighborhood)
        outputs = _in_chunks(first_fn, x, query_rows[near], rows)
        refined = np.full((len(x), outputs.shape[1]), np.nan, np.float32)
    else:
        query_rows, gallery_rows = (
            np.flatnonzero(readable if mask is None else readable & mask)
            for mask in (query, gallery)
        )
        if overlap := len(np.intersect1d(query_rows, gallery_rows)):
            raise ValueError(
                f"{overlap} images are query and gallery at once, so they would be refined and "
                "stay as they are: refine them without the masks"
            )
        near = retrieval.k_reciprocal(x[query_rows], x[gallery_rows], **neighborhood)
        neighborhoods = np.concatenate([query_rows[:, None], gallery_rows[near]], axis=1)
        outputs = _in_chunks(first_fn, x, neighborhoods, rows)
        if outputs.shape[1] != x.shape[1]:
            raise ValueError(
                f"queries of {outputs.shape[1]} numbers cannot be compared with a gallery of "
                f"{x.shape[1]}: use concat_layers=False and width=None"
            )
        refined = x.copy()
    refined[query_rows] = outputs
    return refined


def _in_chunks(
    first_fn: Callable, x: np.ndarray, neighborhoods: np.ndarray, rows: int
) -> np.ndarray:
    """Computes `first_fn(x[neighborhoods])` in chunks of one size, so that it compiles once."""
    rows, count = min(rows, len(neighborhoods)), len(neighborhoods)
    # The last chunk is filled up with the first neighborhoods, whose outputs are dropped.
    filled = neighborhoods[np.arange(-(-count // rows) * rows) % count]
    chunks = filled.reshape(-1, rows, neighborhoods.shape[1])
    return np.concatenate([np.asarray(first_fn(x[chunk])) for chunk in chunks])[:count]
