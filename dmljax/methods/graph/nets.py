"""A network over the images of a batch, which learn from each other while training.

(Seidenschwarz et al., ICML 2021.) The embeddings are the nodes of a graph and exchange messages by
attention (`dmljax.nets.attention`). Its classification loss trains the backbone; at test time it
is usually left away, for it would make an embedding depend on the others of its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from dmljax import ops
from dmljax.nets import attention as kinds
from dmljax.nets.heads import classify
from dmljax.nets.layers import Dense
from dmljax.ops import Array
from dmljax.train.registry import resolve

__all__ = [
    "Graph",
    "GraphNetwork",
    "MessagePassing",
    "correlation",
    "rectified",
    "shifted",
    "similarity_graph",
]


# --- graphs -------------------------------------------------------------------------------------


class Graph(NamedTuple):
    """Who hears whom (receivers are rows), and how loud."""

    adjacency: Bool[Array, "n n"]
    weights: Float[Array, "n n"]


def correlation(x: Float[Array, "n d"]) -> Float[Array, "n n"]:
    """Pearson's correlation of the rows; 0 of a row whose entries are all the same."""
    x = ops.widen(x)
    x = ops.normalize(x - jnp.mean(x, axis=1, keepdims=True))
    return ops.matmul(x, x.T)


def shifted(weights: Float[Array, "n n"], where: Bool[Array, "n n"]) -> Float[Array, "n n"]:
    """`weights` less their minimum, and 0 from a node to itself."""
    least = jnp.min(weights, where=where, initial=jnp.inf)
    return jnp.where(jnp.eye(len(weights), dtype=bool), 0, weights - least)


def rectified(weights: Float[Array, "n n"], where: Bool[Array, "n n"]) -> Float[Array, "n n"]:
    """`weights` where they are positive, else 0."""
    del where
    return jnp.maximum(weights, 0)


def similarity_graph(
    x: Float[Array, "n d"],
    *,
    similarity_fn: Callable = correlation,
    positive_fn: Callable = rectified,
    threshold: float | None = None,
    where: Bool[Array, "n"] | None = None,
) -> Graph:
    """The graph of the pairs whose weight exceeds `threshold`; of all pairs if that is None.

    A weight is `positive_fn(similarity_fn(x), where)`. With `rectified` correlations a node hears
    itself at any threshold below 1, with `shifted` ones it never does at a threshold from 0 on.
    """
    counted = jnp.ones((len(x), len(x)), bool)
    if where is not None:
        x = jnp.where(where[:, None], x, 0)
        counted = where[:, None] & where[None, :]
    weights = positive_fn(similarity_fn(x), counted)
    adjacency = counted if threshold is None else counted & (weights > threshold)
    return Graph(adjacency, jnp.where(adjacency, weights, 0))


# --- networks -----------------------------------------------------------------------------------


class MessagePassing(nn.Module, kw_only=True):
    """One block: LN(h + attention(h)), then LN(h + MLP(h)).

    `attention`: a name or dict of `dmljax.nets.attention`; None leaves out the whole first step.
    `mlp`: "relu" is W_2 ReLU(W_1 h), four times as wide inside; "none" leaves out the whole second
    step; "identity" leaves out the weights only, LN(h + h), which is what `mlp: 0` does in the code
    of Seidenschwarz et al. (ICML 2021). Called like the kinds of attention.
    """

    attention: str | Mapping[str, Any] | None = "dot"
    heads: int = 8
    mlp: str = "relu"
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
        if self.mlp not in ("relu", "identity", "none"):
            raise ValueError(f"mlp is 'relu', 'identity' or 'none', not {self.mlp!r}")
        kinds._check_nodes(nodes, adjacency, edge_weights, where)
        if where is not None:
            nodes = jnp.where(where[:, None], nodes, 0)

        def drop(x, name):
            return nn.Dropout(self.dropout, deterministic=not train, name=name)(x)

        def add(x, step, number):
            x = x + step if self.residual else step
            if not self.norm:
                return x
            norm = nn.LayerNorm(epsilon=1e-5, use_fast_variance=False, name=f"norm{number}")
            return norm(x)

        x, outputs = ops.widen(nodes), {}
        if self.attention is not None:
            outputs = self._attention()(
                x, train=train, adjacency=adjacency, edge_weights=edge_weights, where=where
            )
            x = add(x, drop(outputs.pop("nodes"), "dropout1"), 1)
        if self.mlp != "none":
            step = x
            if self.mlp == "relu":
                inner = Dense(4 * x.shape[1], dtype=self.dtype, name="linear1")(x)
                inner = drop(nn.relu(inner), "dropout")
                step = ops.widen(Dense(x.shape[1], dtype=self.dtype, name="linear2")(inner))
            x = add(x, drop(step, "dropout2"), 2)
        return {"nodes": x, **outputs}

    def _attention(self):
        spec = self.attention
        shared = {"heads": self.heads, "dropout": self.dropout, "dtype": self.dtype}
        given = spec if isinstance(spec, Mapping) else {}
        shared = {name: value for name, value in shared.items() if name not in given}
        return resolve("attention", spec)(**shared, name="att")


class GraphNetwork(nn.Module, kw_only=True):
    """Linear layer, blocks of `MessagePassing`, and a classifier behind a neck.

    Embeddings `[n d]` in; a dict in float32 out: "nodes" `[layers n d]` behind each block,
    "attention" `[layers heads n n]` unless there is none, and what `heads.Head` returns from
    "features" on. Those are the last block's nodes, or with `concat_layers` all blocks' beside
    each other. `width=None` keeps the width of the embeddings; the other arguments are those of
    `MessagePassing`. With classes 98, layers 2, concat_layers=True this is the published network
    for Cars196; attention=None, mlp="none", or both are its ablations.
    """

    classes: int | None = None
    layers: int = 1
    width: int | None = None
    concat_layers: bool = False
    neck: bool = True
    attention: str | Mapping[str, Any] | None = "dot"
    heads: int = 8
    mlp: str = "relu"
    residual: bool = True
    norm: bool = True
    dropout: float = 0.1
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
        kinds._check_nodes(embeddings, adjacency, edge_weights, where)
        if where is not None:
            # A NaN there would come back in the gradient of the weights, as 0 * NaN.
            embeddings = jnp.where(where[:, None], embeddings, 0)
        width = self.width or embeddings.shape[1]
        x = ops.widen(Dense(width, dtype=self.dtype, name="dim_red")(embeddings))
        blocks = _Blocks(
            layers=self.layers,
            block={
                "attention": self.attention,
                "heads": self.heads,
                "mlp": self.mlp,
                "residual": self.residual,
                "norm": self.norm,
                "dropout": self.dropout,
                "dtype": self.dtype,
            },
            name="layers",
        )
        options = {"adjacency": adjacency, "edge_weights": edge_weights, "where": where}
        outputs = blocks(x, train=train, **options)
        # All blocks' nodes beside each other, or the last's.
        stacked = outputs["nodes"]
        features = jnp.concatenate(list(stacked), axis=1) if self.concat_layers else stacked[-1]
        return outputs | classify(
            features,
            classes=self.classes,
            neck=self.neck,
            dtype=self.dtype,
            train=train,
            where=where,
        )


class _Blocks(nn.Module, kw_only=True):
    """Blocks "0", "1", ... one after the other; their outputs stacked."""

    layers: int
    block: Mapping[str, Any]

    @nn.compact
    def __call__(self, x, **options):
        outputs = []
        for i in range(self.layers):
            outputs.append(MessagePassing(**self.block, name=str(i))(x, **options))
            x = outputs[-1]["nodes"]
        return jax.tree.map(lambda *layers: jnp.stack(layers), *outputs)
