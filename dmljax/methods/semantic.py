"""Proxies that a vision transformer makes from the images of a class and prompts of the class.

VPTSP-G: `method={"name": "semantic_proxies"}` with `trained={"name": "prompts"}`.
"""

import functools
from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from dmljax import ops
from dmljax.methods import assemble, base
from dmljax.methods.proxies import proxies
from dmljax.nets.initializers import Initializer, glorot_uniform
from dmljax.nets.layers import Dense
from dmljax.nets.vit import block_count, prompts
from dmljax.ops import Array

__all__ = ["accumulated", "semantic_proxies"]

# The keys from which `proxies` draws are folded with smaller numbers.
_PROMPTS, _HEAD, _GRU, _SEMANTIC = range(1001, 1005)
_STATE = "semantic"


def semantic_proxies(
    net: nn.Module,
    loss_fn: Callable,
    *,
    classes: int,
    count: int = 5,
    depth: int = 3,
    share: float = 0.5,
    dim: int | None = 128,
    pool_fn: Callable | None = None,
    dense_fn: Callable = Dense,
    proxy_init: Initializer | float | None = None,
    prefixes: Sequence[int] = (),
) -> base.Method:
    """Builds semantic proxies of vision transformers (VPTSP-G, Ren et al., ICLR 2024).

    A step reads every image twice. The first time, it becomes an embedding as in `proxies`. The
    second time, the first `depth` blocks read `count` prompts of the image's class besides the
    patches, and not the prompts of `trained=prompts`. A layer norm, a linear layer and a division
    by the norm make a semantic vector of width d from what the net pools. A GRU merges the vectors
    of a class, one image after the other, into the semantic proxy of the class, which is kept from
    step to step (`accumulated`). The loss sees the proxies

        share * params["proxies"] + (1 - share) * model_state["semantic"]

    Gradients reach the prompts of the classes in the batch, the generator, and the net where it
    learns; they do not reach earlier steps. Nothing of this is needed to embed images.

    These details follow the code published with the paper, which also trains the biases of
    the net. Its options differ by data set: with ViT-B/16, 5 prompts in one block and the share 0.4
    for CUB-200-2011, 5 prompts in 8 blocks and 0.2 for Stanford Online Products. Three details are
    ours: the GRU is Flax's, whose candidate has one bias more; prompts of classes are drawn as
    other prompts are; a class may have any number of images in the batch.

    * `count`, `depth`: prompts of a class in each block, and blocks that read them. A class needs
      `count * depth * width` parameters.
    * `share`: of the learned proxies. By default they are drawn uniformly with variance
      1 / (32 (c + d)), so that semantic proxies, which are unit vectors, decide at first.
    * `dim`, `pool_fn`, `dense_fn`, `proxy_init`, `prefixes`: see `proxies`.
    """
    if min(count, depth) < 1 or not 0 <= share <= 1:
        raise ValueError(
            f"method=semantic_proxies: count={count} and depth={depth} must be 1 or more, and "
            f"share={share} between 0 and 1"
        )
    if isinstance(net, assemble.FeaturesOrImages):
        raise ValueError(
            "method=semantic_proxies: the net reads images again with prompts of their classes, "
            "so features='cached' is not enough: leave it out by --config.features=computed"
        )
    plain = proxies(
        net,
        loss_fn,
        classes=classes,
        dim=dim,
        pool_fn=pool_fn,
        dense_fn=dense_fn,
        proxy_init=_small if proxy_init is None else proxy_init,
        prefixes=prefixes,
    )
    assert plain.split_loss is not None
    split = plain.split_loss

    def init(key, batch, *, backbone=None):
        params, model_state = plain.init(key, batch, backbone=backbone)
        total, d = block_count(params["net"]), params["proxies"].shape[-1]
        if depth > total:
            raise ValueError(
                f"method=semantic_proxies: depth={depth} is above the {total} blocks of this net "
                "that read tokens: take a vision transformer, such as dinov2_s14, or less"
            )
        fold = functools.partial(jax.random.fold_in, key)
        rows = prompts(fold(_PROMPTS), params["net"], (classes, depth, count))
        tokens = rows[jnp.zeros(len(batch["images"]), int)]
        pooled = _pooled(net, params["net"], model_state, batch["images"], tokens)
        vectors = jnp.zeros((1, d))
        generator = {
            "prompts": rows,
            "head": _Head(d).init(fold(_HEAD), pooled)["params"],
            "gru": _cell(d).init(fold(_GRU), vectors, vectors)["params"],
        }
        first = ops.normalize(glorot_uniform(fold(_SEMANTIC), (classes, d)))
        return {**params, "generator": generator}, {**model_state, _STATE: first}

    def loss(params, model_state, batch, *, key, step):
        labels, semantic = batch["labels"], model_state[_STATE]
        generator, d = params["generator"], semantic.shape[1]
        outputs, model_state = split.forward(params, model_state, batch["images"], key=key)
        tokens = generator["prompts"][labels]  # [b depth count width]
        pooled = _pooled(net, params["net"], model_state, batch["images"], tokens)
        vectors = _Head(d).apply({"params": generator["head"]}, pooled)

        def merge_fn(row, vector):
            return _cell(d).apply({"params": generator["gru"]}, row, vector)[0]

        semantic = accumulated(merge_fn, semantic, vectors, labels)
        rows = share * params["proxies"] + (1 - share) * semantic
        value, (model_state, metrics) = split.criterion(
            {**params, "proxies": rows}, model_state, outputs, batch, key=key, step=step
        )
        return value, ({**model_state, _STATE: jax.lax.stop_gradient(semantic)}, metrics)

    return plain._replace(
        init=init,
        loss=loss,
        split_loss=None,  # `forward` gets no labels
        per_class=("proxies", "generator/prompts"),
    )


def accumulated(
    merge_fn: Callable,
    semantic: Float[Array, "c d"],
    vectors: Float[Array, "b d"],
    labels: Int[Array, "b"],
) -> Float[Array, "c d"]:
    """Updates the semantic proxies with the vectors of a batch, as unit vectors.

    For one vector after the other, `semantic[label] = merge_fn(semantic[label], vector)`. Only the
    rows of the batch are carried along, so that the memory does not depend on the classes.
    """
    slots = jnp.argmax(labels[:, None] == labels[None, :], axis=1)  # the first image of its class

    def merge(rows, slot_and_vector):
        slot, vector = slot_and_vector
        return rows.at[slot].set(merge_fn(rows[slot], vector)), None

    rows, _ = jax.lax.scan(merge, semantic[labels], (slots, vectors))
    return ops.normalize(jnp.asarray(semantic).at[labels].set(rows[slots]))


class _Head(nn.Module):
    """A layer norm, a linear layer and a division by the norm."""

    features: int

    @nn.compact
    def __call__(self, pooled):
        x = nn.LayerNorm(1e-5, name="norm")(pooled)
        options = {"kernel_init": glorot_uniform, "bias_init": nn.initializers.zeros}
        return ops.normalize(Dense(self.features, **options, name="linear")(x))


def _cell(features: int) -> nn.GRUCell:
    """Applies a GRU cell with ReLU in place of tanh."""
    return nn.GRUCell(
        features,
        activation_fn=nn.relu,
        kernel_init=glorot_uniform,
        recurrent_kernel_init=glorot_uniform,
    )


def _pooled(net, params, model_state, images, tokens):
    """Pools images `[b ...]` together with tokens `[b depth count width]`."""
    depth = tokens.shape[1]
    # Blocks after the first `depth` ones read no prompts: a tuple, as their numbers differ.
    by_block = (*(tokens[:, i] for i in range(depth)), tokens[:, 0, :0])
    variables = {"params": {**params, "prompts": by_block}}
    if "net" in (statistics := model_state.get("batch_stats", {})):
        variables["batch_stats"] = statistics["net"]
    return net.apply(variables, images, train=False)["pooled"]


def _small(key, shape, dtype=jnp.float32):
    return glorot_uniform(key, shape, dtype) / 8
