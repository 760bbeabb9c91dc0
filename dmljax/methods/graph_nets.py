"""A network over the images of a batch, which exchange messages by attention.

(Seidenschwarz et al., ICML 2021.) The nodes of the graph are the embeddings of a batch. Receivers
are rows and senders are columns, in `adjacency` as in `edge_weights`. The classification loss of
this network trains the backbone. At test time it is usually left out, because it makes an embedding
depend on the other images of the batch.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from dmljax import ops
from dmljax.nets.attention import check_nodes, dot
from dmljax.nets.heads import classify
from dmljax.nets.layers import Dense
from dmljax.ops import Array

__all__ = [
    "Graph",
    "GraphNetwork",
    "MessagePassing",
    "correlation",
    "dot_products",
    "identity",
    "mlp",
    "rectified",
    "shifted",
    "similarity_edges",
    "similarity_graph",
]


class Graph(NamedTuple):
    """Which nodes receive from which, and factors for their attention (None: 1)."""

    adjacency: Bool[Array, "n n"]
    weights: Float[Array, "n n"] | None = None


def similarity_graph(
    x: Float[Array, "n d"],
    *,
    similarity_fn: Callable | None = None,
    positive_fn: Callable | None = None,
    threshold: float | None = None,
    where: Bool[Array, "n"] | None = None,
) -> Graph:
    """Builds the graph of all pairs whose weight exceeds `threshold`; None keeps all pairs.

    A weight is `positive_fn(similarity_fn(x), where)`; the defaults are `rectified` and
    `correlation`. Rows outside `where` have no edges. With `rectified` correlations a node receives
    from itself at any threshold below 1, with `shifted` ones at no threshold from 0 on.
    """
    similarity_fn, positive_fn = similarity_fn or correlation, positive_fn or rectified
    counted: Array = jnp.ones((len(x), len(x)), bool)
    if where is not None:
        x = jnp.where(where[:, None], x, 0)
        counted = where[:, None] & where[None, :]
    weights = positive_fn(similarity_fn(x), counted)
    adjacency = counted if threshold is None else counted & (weights > threshold)
    return Graph(adjacency, jnp.where(adjacency, weights, 0))


def similarity_edges(
    x: Float[Array, "n d"],
    *,
    similarity_fn: Callable | None = None,
    positive_fn: Callable | None = None,
    threshold: float | None = None,
    where: Bool[Array, "n"] | None = None,
) -> Graph:
    """Returns the edges of `similarity_graph` without weights."""
    graph = similarity_graph(
        x,
        similarity_fn=similarity_fn,
        positive_fn=positive_fn,
        threshold=threshold,
        where=where,
    )
    return Graph(graph.adjacency)


def correlation(x: Float[Array, "n d"]) -> Float[Array, "n n"]:
    """Computes Pearson's correlation between rows; a row with equal entries gives 0."""
    x = ops.widen(x)
    x = ops.normalize(x - jnp.mean(x, axis=1, keepdims=True))
    return ops.matmul(x, x.T)


def dot_products(x: Float[Array, "n d"]) -> Float[Array, "n n"]:
    """Computes dot products between rows."""
    return -ops.dot(x, x)  # a distance: it is smaller for rows that are more alike


def rectified(weights: Float[Array, "n n"], where: Bool[Array, "n n"]) -> Float[Array, "n n"]:
    """Returns positive `weights`, and 0 for the others."""
    del where
    return jnp.maximum(weights, 0)


def shifted(weights: Float[Array, "n n"], where: Bool[Array, "n n"]) -> Float[Array, "n n"]:
    """Subtracts the minimum over `where` from `weights`; the weight from a node to itself is 0."""
    minimum = jnp.min(weights, where=where, initial=jnp.inf)
    return jnp.where(jnp.eye(len(weights), dtype=bool), 0, weights - minimum)


def mlp(
    x: Float[Array, "n d"], *, dropout_fn: Callable[[Array, str], Array], dtype: Any = None
) -> Float[Array, "n d"]:
    """Computes W_2 dropout(ReLU(W_1 x)) with a hidden width of four times the input.

    Creates "linear1", "linear2" and "dropout" in the module that calls it.
    """
    hidden: Array = Dense(4 * x.shape[1], dtype=dtype, name="linear1")(x)
    hidden = dropout_fn(nn.relu(hidden), "dropout")
    return ops.widen(Dense(x.shape[1], dtype=dtype, name="linear2")(hidden))


def identity(
    x: Float[Array, "n d"], *, dropout_fn: Callable[[Array, str], Array], dtype: Any = None
) -> Float[Array, "n d"]:
    """Returns x itself; the block adds it to itself, as the published code does with `mlp: 0`."""
    del dropout_fn, dtype
    return x


class MessagePassing(nn.Module, kw_only=True):
    """One block: h = LN(h + attention(h)), then h = LN(h + mlp(h)).

    It is called like the modules of `dmljax.nets.attention`, and returns "nodes" `[n d]` and what
    the attention returns besides its nodes.

    * `attention_fn`: makes the module of the first step; called with `dtype` and `name`. None
      leaves out the whole step.
    * `mlp_fn`: the second step, such as `mlp` or `identity`. None leaves out the whole step.
    * `residual`: adds a step to its input instead of replacing it. `norm`: adds the layer norms.
      Both are switches of the published code (`res1`, `norm1`), for ablations.
    * `dropout`: the rate for the results of both steps and inside `mlp`.
    """

    attention_fn: Callable[..., nn.Module] | None = dot
    mlp_fn: Callable | None = mlp
    residual: bool = True
    norm: bool = True
    dropout: float = 0.1
    dtype: Any = None

    @nn.compact
    def __call__(
        self,
        nodes: Float[Array, "n d"],
        *,
        train: bool,
        adjacency: Bool[Array, "n n"] | None = None,
        edge_weights: Float[Array, "n n"] | None = None,
        where: Bool[Array, "n"] | None = None,
    ) -> dict[str, Array]:
        check_nodes(nodes, adjacency, edge_weights, where)
        if where is not None:
            nodes = jnp.where(where[:, None], nodes, 0)

        def dropout_fn(x, name):
            return nn.Dropout(self.dropout, deterministic=not train, name=name)(x)

        def merge(x, update, number):
            x = x + update if self.residual else update
            if not self.norm:
                return x
            norm = nn.LayerNorm(epsilon=1e-5, use_fast_variance=False, name=f"norm{number}")
            return norm(x)

        x, outputs = ops.widen(nodes), {}
        if self.attention_fn is not None:
            attention = self.attention_fn(dtype=self.dtype, name="att")
            outputs = attention(
                x, train=train, adjacency=adjacency, edge_weights=edge_weights, where=where
            )
            x = merge(x, dropout_fn(outputs.pop("nodes"), "dropout1"), 1)
        if self.mlp_fn is not None:
            update = self.mlp_fn(x, dropout_fn=dropout_fn, dtype=self.dtype)
            x = merge(x, dropout_fn(update, "dropout2"), 2)
        return {"nodes": x, **outputs}


class GraphNetwork(nn.Module, kw_only=True):
    """Linear layer, blocks of message passing, and a classifier.

    It takes embeddings `[n d]` and the optional arguments of `dmljax.nets.attention`. It returns in
    float32: "nodes" `[layers n d]` after every block, "attention" `[layers heads n n]` if the
    blocks return it, and the outputs of `heads.Head` from "features" on. The features are the nodes
    after the last block.

    * `classes`: number of classes of the classifier; None leaves it out.
    * `layers`: number of blocks. `block_fn` makes one; called with `dtype` and `name`.
    * `width`: of the nodes; None keeps the width of the embeddings.
    * `concat_layers`: the features are the nodes after all blocks, side by side.
    * `neck`: the classifier reads the features after a batch norm.

    With classes=98, layers=2, concat_layers=True this is the published network for Cars196.
    """

    classes: int | None = None
    layers: int = 1
    block_fn: Callable[..., nn.Module] = MessagePassing
    width: int | None = None
    concat_layers: bool = False
    neck: bool = True
    dtype: Any = None

    @nn.compact
    def __call__(
        self,
        embeddings: Float[Array, "n d"],
        *,
        train: bool,
        adjacency: Bool[Array, "n n"] | None = None,
        edge_weights: Float[Array, "n n"] | None = None,
        where: Bool[Array, "n"] | None = None,
    ) -> dict[str, Array]:
        check_nodes(embeddings, adjacency, edge_weights, where)
        if where is not None:
            # A NaN in a masked row would reach the gradient of the weights as 0 * NaN.
            embeddings = jnp.where(where[:, None], embeddings, 0)
        width = self.width or embeddings.shape[1]
        x = ops.widen(Dense(width, dtype=self.dtype, name="dim_red")(embeddings))
        blocks = _Blocks(
            layers=self.layers, block_fn=self.block_fn, dtype=self.dtype, name="layers"
        )
        options = {"adjacency": adjacency, "edge_weights": edge_weights, "where": where}
        outputs = blocks(x, train=train, **options)
        nodes = outputs["nodes"]  # [layers n d]
        features = jnp.concatenate(list(nodes), axis=1) if self.concat_layers else nodes[-1]
        return outputs | classify(
            features,
            classes=self.classes,
            neck=self.neck,
            dtype=self.dtype,
            train=train,
            where=where,
        )


class _Blocks(nn.Module, kw_only=True):
    """Blocks "0", "1", ... in sequence; returns their outputs, stacked."""

    layers: int
    block_fn: Callable[..., nn.Module]
    dtype: Any

    @nn.compact
    def __call__(self, x, **options):
        outputs = []
        for i in range(self.layers):
            block = self.block_fn(dtype=self.dtype, name=str(i))
            outputs.append(block(x, **options))
            x = outputs[-1]["nodes"]
        return jax.tree.map(lambda *layers: jnp.stack(layers), *outputs)
