"""Attention among the images of a batch: every image is a node, which receives from the others.

Every function makes a Flax module, whose arguments are the fields of its class. It is called as
`(nodes [n d], *, train, ...) -> {"nodes": [n d], "attention": [heads n n]}`, all in float32. Rows
of the attention are receivers, columns are senders. Optional arguments:

* `adjacency [n n]`: True where receiver i (the row) receives from sender j. None: every node from
  every node, itself included. A node that receives from none gets the message 0.
* `edge_weights [n n]`: factors for the attention after its softmax, without a new normalization.
* `where [n]`: nodes that count. Masking a node equals dropping it; its own row is meaningless.

The returned attention is the one before dropout. In training, dropout needs the random stream
"dropout". Products are computed in `dtype`; scores and softmax in float32.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from dmljax import ops
from dmljax.hints import check_all
from dmljax.nets.initializers import fan_in_uniform
from dmljax.nets.layers import Dense, glorot_dense, named
from dmljax.ops import Array

__all__ = [
    "average_heads",
    "check_nodes",
    "concatenate_heads",
    "dot",
    "dot_plus_one",
    "gat",
    "gatv2",
]

CombineFn = Callable[[Array], Array]


def concatenate_heads(messages: Float[Array, "n heads w"]) -> Float[Array, "n heads*w"]:
    """Concatenates the messages of all heads."""
    return messages.reshape(len(messages), -1)


def average_heads(messages: Float[Array, "n heads w"]) -> Float[Array, "n w"]:
    """Averages the messages of all heads."""
    return jnp.mean(ops.widen(messages), axis=1).astype(messages.dtype)


def _softmax(scores, where, *, lowest=-jnp.inf):
    """Computes weights that sum to 1 for each receiver, or are all 0 without senders.

    With `lowest=0`, there is one more sender, whose score and message are 0.
    """
    peak = jnp.max(scores, axis=-1, keepdims=True, where=where, initial=lowest)
    peak = jax.lax.stop_gradient(jnp.where(peak == -jnp.inf, 0, peak))
    terms = jnp.exp(jnp.where(where, scores - peak, -jnp.inf))
    total = jnp.sum(terms, axis=-1, keepdims=True) + jnp.exp(lowest - peak)
    return terms / jnp.where(total == 0, 1, total)


def _dot_scores(receivers, senders):
    wide = jnp.promote_types(receivers.dtype, jnp.float32)
    products = jnp.matmul(receivers, senders.T, preferred_element_type=wide)
    return products / receivers.shape[1] ** 0.5


def _gat_scores(receivers, senders, vector, *, slope):
    receiver_vector, sender_vector = jnp.split(vector, 2)
    receiver_scores = ops.widen(receivers) @ receiver_vector
    sender_scores = ops.widen(senders) @ sender_vector
    return nn.leaky_relu(receiver_scores[:, None] + sender_scores[None, :], slope)


def _gatv2_scores(receivers, senders, vector, *, slope):
    receivers, senders = ops.widen(receivers), ops.widen(senders)

    # All terms at once are n n w numbers, and several times that for the gradient. A few receivers
    # at a time, recomputed for the gradient, fit into the cache of a CPU and are faster, too.
    @jax.checkpoint
    def scores_of(receiver):
        terms = nn.leaky_relu(receiver[None, :] + senders, slope)  # [n w]
        return jnp.sum(terms * vector[None, :], axis=1)

    return jax.lax.map(scores_of, receivers, batch_size=16)


class _Attention(nn.Module, kw_only=True):
    """The part that all modules share: checks and masks. Subclasses define `_heads`.

    `combine_fn`: `concatenate_heads` splits the features among the heads; `average_heads` gives
    every head all of them. In a config its name.
    """

    heads: int = 8
    combine_fn: CombineFn = concatenate_heads
    dropout: float = 0.1
    dtype: Any = None

    def __call__(
        self,
        nodes: Float[Array, "n d"],
        *,
        train: bool,
        adjacency: Bool[Array, "n n"] | None = None,
        edge_weights: Float[Array, "n n"] | None = None,
        where: Bool[Array, "n"] | None = None,
    ) -> dict[str, Array]:
        n = check_nodes(nodes, adjacency, edge_weights, where)
        mask = jnp.ones((n, n), bool) if adjacency is None else jnp.asarray(adjacency)
        if where is not None:
            # A masked row may hold anything, and 0 * NaN would reach the other rows.
            nodes = jnp.where(where[:, None], nodes, 0)
            mask = mask & where[:, None] & where[None, :]
        if edge_weights is not None:
            edge_weights = jnp.where(mask, ops.widen(edge_weights), 0)
        return self._heads(nodes, mask, edge_weights, train)


class Dot(_Attention, kw_only=True):
    """Dot-product attention (Vaswani et al., 2017).

    sum_j softmax_j(q_i.k_j / sqrt(w)) v_j for every head of width w, then a linear layer of the
    combined heads. The text of Seidenschwarz et al. (ICML 2021) divides by the root of the full
    width d; their code, as here, by the root of w. Their code computes `dot_plus_one`, with the
    weights exp(s_j) / (1 + sum_k exp(s_k)), which sum to less than 1; their formula is `dot`.
    """

    softmax_fn: Callable = _softmax

    @nn.compact
    def _heads(self, nodes, mask, edge_weights, train):
        def linear(x, features, name):
            return glorot_dense(features, dtype=self.dtype, name=name)(x)

        def split(name):
            return linear(nodes, self.heads * width, name).reshape(-1, self.heads, width)

        features = nodes.shape[1]
        width = _width_before(self.combine_fn, self.heads, features)
        queries, keys, values = split("q_linear"), split("k_linear"), split("v_linear")
        scores = jax.vmap(_dot_scores, in_axes=1)(queries, keys)  # [heads n n]
        weights = _attention(self.softmax_fn, scores, mask, edge_weights)
        messages = self.combine_fn(_messages(weights, values, self.dropout, train))
        return {"nodes": ops.widen(linear(messages, features, "out")), "attention": weights}


class GraphAttention(_Attention, kw_only=True):
    """Graph attention without biases: `gat` and `gatv2`.

    `gat` (Velickovic et al., ICLR 2018): sum_j softmax_j(LeakyReLU(a.[W h_i, W h_j])) W h_j. Every
    receiver ranks the senders in the same order. `gatv2` (Brody et al., ICLR 2022): sum_j
    softmax_j(a.LeakyReLU(V h_i + W h_j)) W h_j. With `share_projection=True` V is W, and the score
    from i to j equals the score from j to i.

    * `share_vector`: all heads share one vector a. `share_projection=False`: receivers have a
      projection of their own.
    * `sublayers=2` adds an ELU and a second layer of one head, whose attention is returned as
      "attention_2" [1 n n]. The paper's equation has one layer. The published code of the study of
      graph attention for metric learning has two, and produced its results with them.
    * `slope`: of the LeakyReLU for negative values.
    """

    scores_fn: Callable
    vector_parts: int  # 2: one part each for receiver and sender; 1: for their sum
    linear: str  # the name of W
    share_vector: bool = False
    share_projection: bool = False
    sublayers: int = 1
    slope: float = 0.2

    @nn.compact
    def _heads(self, nodes, mask, edge_weights, train):
        def project(x, heads, width, name):
            y = Dense(heads * width, use_bias=False, dtype=self.dtype, name=name)(x)
            return y.reshape(-1, heads, width)

        def sublayer(heads, combine_fn, x):
            """Computes one layer: nodes [n d] -> nodes [n d], attention [heads n n]."""
            width = _width_before(combine_fn, heads, nodes.shape[1])
            senders = receivers = project(x, heads, width, self.linear)
            if not self.share_projection:
                receivers = project(x, heads, width, "linear_r")
            shape = (self.vector_parts * width, 1 if self.share_vector else heads)
            vectors = jnp.broadcast_to(_Kernel(shape=shape, name="attn")(), (shape[0], heads))
            scores_fn = functools.partial(self.scores_fn, slope=self.slope)
            scores = jax.vmap(scores_fn, in_axes=1)(receivers, senders, vectors)
            weights = _attention(_softmax, scores, mask, edge_weights)
            messages = _messages(weights, senders, self.dropout, train)  # [n heads w]
            return combine_fn(messages), weights

        def layer(x, heads, combine_fn, name):
            x = nn.Dropout(self.dropout, deterministic=not train, name=f"dropout_{name}")(x)
            return named(name, functools.partial(sublayer, heads, combine_fn), x)

        if self.sublayers not in (1, 2):
            raise ValueError(f"sublayers is 1 or 2, not {self.sublayers}")
        x, weights = layer(nodes, self.heads, self.combine_fn, "layer1")
        if self.sublayers == 1:
            return {"nodes": ops.widen(x), "attention": weights}
        x, weights_2 = layer(nn.elu(x), 1, average_heads, "output")
        return {"nodes": ops.widen(x), "attention": weights, "attention_2": weights_2}


dot = Dot
dot_plus_one = functools.partial(Dot, softmax_fn=functools.partial(_softmax, lowest=0.0))
gat = functools.partial(
    GraphAttention,
    scores_fn=_gat_scores,
    vector_parts=2,
    linear="linear",
    share_projection=True,
)
gatv2 = functools.partial(
    GraphAttention, scores_fn=_gatv2_scores, vector_parts=1, linear="linear_l"
)


class _Kernel(nn.Module, kw_only=True):
    """A parameter "kernel", initialized like the kernel of a linear layer."""

    shape: tuple[int, int]

    @nn.compact
    def __call__(self):
        return self.param("kernel", fan_in_uniform(self.shape[0]), self.shape)


def _attention(softmax_fn, scores, mask, edge_weights):
    """Returns the attention [heads n n] of scores [heads n n]."""
    weights = jax.vmap(softmax_fn, in_axes=(0, None))(scores, mask)
    return weights if edge_weights is None else weights * edge_weights[None, :, :]


def _messages(weights, values, dropout, train):
    """Sums `values [n heads w]` by weight for every receiver and head, with dropout."""
    weights = nn.Dropout(dropout, deterministic=not train, name="dropout")(weights)
    return jax.vmap(jnp.matmul, in_axes=(0, 1), out_axes=1)(weights.astype(values.dtype), values)


def check_nodes(nodes: Any, adjacency: Any, edge_weights: Any, where: Any) -> int:
    """Returns the number of nodes n. Raises unless nodes are [n d] floats and the other arrays fit
    them.
    """
    shape, is_float = list(jnp.shape(nodes)), jnp.issubdtype(nodes.dtype, jnp.floating)
    text = f"nodes are [n d] floats, one row per image, not {nodes.dtype} {shape}"
    problems, n = {text: len(shape) != 2 or not is_float}, (*shape, 0)[0]
    arrays = {"adjacency": adjacency, "edge_weights": edge_weights, "where": where}
    for name, array in arrays.items():
        if array is not None:
            shape, expected = list(jnp.shape(array)), [n] if name == "where" else [n, n]
            text = f"{name} of {n} nodes must have the shape {expected}, not {shape}"
            problems[text] = shape != expected
            text = f"{name} must be boolean, not {array.dtype}: write {name} > 0"
            problems[text] = name != "edge_weights" and array.dtype != bool
    check_all(problems)
    return n


def _width_before(combine_fn: CombineFn, heads: int, features: int) -> int:
    """Returns the width of a head whose messages become `features` numbers in `combine_fn`."""
    parts = 0
    if heads > 0:
        messages = jax.ShapeDtypeStruct((1, heads, features), jnp.float32)
        parts = jax.eval_shape(combine_fn, messages).shape[1] // features
    if parts < 1 or features % parts:
        divisors = ", ".join(str(h) for h in range(1, min(features, 64) + 1) if features % h == 0)
        raise ValueError(f"{heads} heads cannot share {features} features: take one of {divisors}")
    return features // parts
