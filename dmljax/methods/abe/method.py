"""The method ABE: learners with a metric loss each, and a divergence that keeps them apart."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float

from dmljax import ops
from dmljax.methods import assemble, base
from dmljax.methods.abe import nets
from dmljax.methods.abe.losses import divergence
from dmljax.ops import Array

__all__ = ["abe"]


def abe(
    net: nn.Module,
    loss_fn: Callable,
    *,
    classes: int,
    mine_fn: Callable | base.RandomMiner | None = None,
    learners: int = 8,
    dim: int = 512,
    split: Sequence[str] = ("pool3", "4a"),
    attention: str | None = "4e",
    attention_pools: bool = True,
    mask_fn: Callable = jax.nn.sigmoid,
    pool_fn: Callable | None = None,
    pairs_fn: Callable | None = None,
    lambda_div: float = 1.0,
    divergence_fn: Callable = divergence,
) -> base.Method:
    """Builds ABE-M (Kim et al., 2018): sum_m loss_fn(B_m(x), y) + lambda_div divergence_fn(B(x)).

    `embed` returns the unit vectors of the learners side by side, divided by sqrt(M). A ranking by
    it is a ranking by the mean of the learners' squared distances. The parts are the learners.

    * `loss_fn`, `mine_fn`: any pair loss; `contrastive` in `losses.py` of this folder is the
      paper's.
    * `learners`, `dim`: M, and the dimensions of all learners together.
    * `split`: the last stage of `net` that all learners share, and the stage after it. `attention`:
      the last stage of the attention's copy. The defaults are stages of Caffe's GoogLeNet. Any
      backbone with `start` and `stop` will do: for `convnet` `split=("conv3", "conv4")` and
      `attention="conv4"`, for `dinov2_s14` `split=("5", "6")` and `attention="8"`, for `convnext_t`
      `split=("2.4", "2.5")` and `attention="2.8"`. The class token and the registers of a `vit` get
      masks as patches do.
    * `attention=None`: the control in the paper, M separate heads on the shared stages. One learner
      is then a plain net. The paper's rows have `lambda_div=0`, and it reports that the divergence
      changes nothing here.
    * `attention_pools=False`: the attention's copy of the net has no pools, so it can go on behind
      a pool, as in figure 7 of the paper. Only `googlenet` can leave them out.
    * `mask_fn`: logits -> masks `[b h w c]`. The paper does not name it; one port reports a
      sigmoid, another uses `nets.min_max` instead.
    * `pool_fn`: how the last map of a learner becomes a vector; the paper takes the mean.
    * `pairs_fn`: labels -> pairs that the loss compares. None compares all pairs of the batch,
      `losses.drawn_pairs` only those that the sampler drew. The paper does not say which.
    * `divergence_fn`: learners `[b m d]` -> number. It gets the `step` if it has this argument.
    """
    del classes
    last_shared, first_separate = split
    options = {
        "learners": learners,
        "features": dim,
        "net": _like(net),
        "split": (last_shared, first_separate),
        "pool_fn": pool_fn,
        "remat": net.remat,
        "dtype": net.dtype,
    }
    loss_fn = base.with_miner(loss_fn, mine_fn)
    if attention is None:
        heads = nets.MultiHead(**options)
        return _ensemble_method(heads, loss_fn, pairs_fn, lambda_div, divergence_fn)[0]
    if not attention_pools and not hasattr(net, "pools"):
        raise ValueError(
            f"attention_pools=False: {type(net).__name__} has no pools to leave out; take googlenet"
        )
    attention_net = options["net"] if attention_pools else _like(net.clone(pools=False))
    ensemble = nets.ABE(
        attention=attention, attention_net=attention_net, mask_fn=mask_fn, **options
    )
    method, outputs_fn = _ensemble_method(ensemble, loss_fn, pairs_fn, lambda_div, divergence_fn)

    def spatial_masks(params, model_state, images):
        return {"masks": outputs_fn(params, model_state, images)["masks"]}

    assert method.inspect is not None
    return method._replace(inspect=method.inspect._replace(spatial_masks=spatial_masks))


def _ensemble_method(
    ensemble: nn.Module,
    loss_fn: Callable,
    pairs_fn: Callable | None,
    lambda_div: float,
    divergence_fn: Callable,
) -> tuple[base.Method, Callable]:
    """Builds the method of an ensemble of `nets`, and the function of its outputs."""
    learners = ensemble.learners
    divergence_fn = base.with_step(divergence_fn)
    module = assemble.modules(lambda run, images: run["net"](images), net=ensemble)

    def init(key, batch, *, backbone=None):
        params, model_state, _ = module.init(key, batch["images"])
        if backbone is None:
            return params, model_state
        variables = {"params": params["net"]}
        if "batch_stats" in model_state:
            variables["batch_stats"] = model_state["batch_stats"]["net"]
        variables = nets.with_backbone(variables, backbone)
        return assemble.with_backbone(params, model_state, variables)

    def loss(params, model_state, batch, *, key, step):
        outputs, model_state = module.apply(
            params, model_state, batch["images"], train=True, key=jax.random.fold_in(key, 0)
        )
        x = outputs["learners"]  # [b m d]
        labels = batch["labels"] if pairs_fn is None else pairs_fn(batch["labels"])
        keys = jax.random.split(jax.random.fold_in(key, 1), learners)

        def metric(x, key):
            return loss_fn(x, labels, key=key, step=step)

        metric_losses = jax.vmap(metric, in_axes=(1, 0))(x, keys)
        metrics = base.diagnostics(outputs["embeddings"], batch["labels"])
        metrics["metric"] = jnp.sum(metric_losses)
        metrics["divergence"] = divergence_fn(x, step=step)
        if learners > 1:
            metrics["self_cosine"] = _self_cosine(jax.lax.stop_gradient(x))
        return metrics["metric"] + lambda_div * metrics["divergence"], (model_state, metrics)

    def outputs_fn(params, model_state, images):
        return module.apply(params, model_state, images, train=False)[0]

    def embed(params, model_state, images):
        return ops.normalize(outputs_fn(params, model_state, images)["embeddings"])

    def parts(params, model_state, images):
        vectors = outputs_fn(params, model_state, images)["learners"]
        return {f"learner_{m}": vectors[:, m] for m in range(learners)}

    inspect = base.Inspect(parts=parts if learners > 1 else None)
    copies = ["shared", "attention", "head", *(f"head_{m}" for m in range(learners))]
    backbone = tuple(f"net/{copy}" for copy in copies)
    method = base.Method(init, loss, embed, None, inspect, backbone=backbone, per_class=())
    return method, outputs_fn


def _like(net: nn.Module) -> Callable[..., nn.Module]:
    """Returns a function that creates nets like `net`, with other stages and names."""
    fields = {f.name: getattr(net, f.name) for f in dataclasses.fields(net)}
    if not {"start", "stop"} <= set(fields):
        raise ValueError(
            f"abe needs a net that runs from any stage to any other, and {type(net).__name__} does "
            "not (it has no start and stop): take googlenet, resnet50, vit_s16, ..."
        )
    set_by_ensemble = ("parent", "name", "remat", "dtype")
    options = {name: value for name, value in fields.items() if name not in set_by_ensemble}
    return functools.partial(type(net), **options)


def _self_cosine(learners: Float[Array, "b m d"]) -> Float[Array, ""]:
    """Computes the mean cosine between two learners of an image; collapsed ones are near 1."""
    m = learners.shape[1]
    total = jnp.sum(learners, axis=1)  # |sum of unit vectors|^2 = m + 2 sum_{p<q} cos
    return jnp.mean(jnp.sum(total * total, axis=1) - m) / (m * (m - 1))
