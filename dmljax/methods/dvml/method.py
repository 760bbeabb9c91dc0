"""The method DVML: variation within a class is modeled as noise (Lin et al., ECCV 2018).

The features f of the backbone become z_I, the embedding at test time, and the mean and the
variance of z_V, the variation within a class. A decoder restores f from z = z_I + z_V.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from dmljax import ops
from dmljax.methods import assemble, base
from dmljax.methods.dvml.losses import divergence, reconstruction_norm
from dmljax.methods.dvml.nets import (
    VariationalDecoder,
    VariationalHeads,
    sample_variations,
    standard_deviation,
)
from dmljax.nets import initializers
from dmljax.nets.heads import Head
from dmljax.ops import Array

__all__ = ["dvml"]

TERMS = ("kl", "reconstruction", "metric_variant", "metric_invariant")


def dvml(
    net: nn.Module,
    loss_fn: Callable,
    *,
    classes: int,
    mine_fn: Callable | base.RandomMiner | None = None,
    pool_fn: Callable | None = None,
    variational: bool = True,
    dim: int = 512,
    norms: Sequence[str] = (),
    hidden: int = 512,
    activation_fn: Callable = jax.nn.tanh,
    decoder_norm: bool = False,
    samples: int = 20,
    metric_samples: int = 1,
    deviation_fn: Callable = standard_deviation,
    reparameterized: bool = True,
    reconstruction_fn: Callable = reconstruction_norm,
    learn_target: bool = False,
    lambdas: Sequence[Sequence[float]] = ((1, 1, 0.1, 1), (0.8, 1, 0.2, 0.8)),
    phase_at: int = 1500,
    release: Sequence[bool] = (False, True),
    train_decoder: Sequence[bool] = (True, True),
    decay: float = 0.0,
    probe: bool = False,
) -> base.Method:
    """Builds DVML: a weighted sum of KL divergence, reconstruction and two metric losses.

    lambda_1 KL + lambda_2 |f - decoder(z)| + lambda_3 loss_fn(z, y) + lambda_4 loss_fn(z_I, y).

    The defaults are the form of the paper. Arguments with two values have one for each phase of
    training. An optimizer group with the path "^decoder/" or "^probe/" gives these parameters
    another learning rate.

    The metrics are the terms before weighting: "kl", "reconstruction", "metric_variant" (of z),
    "metric_invariant" (of z_I), and, if they are on, "decay" and "cross_entropy" (of the probe).
    "weighted/L1" to "weighted/L4" are the terms times their lambdas. L4 contains the decay, as in
    the plots of the public report.

    * `loss_fn`, `mine_fn`: any pair loss.
    * `pool_fn`: how a map becomes the features f; see `assemble.encoder`.
    * `variational=False` leaves out the mean, the variance, the decoder and the first three terms.
      This is the control: the layer of z_I, its batch norm, the decay, lambda_4 and the probe stay.
    * `dim`, `norms`: width and batch norms of the heads, see `VariationalHeads`.
    * `hidden`, `activation_fn`, `decoder_norm`: of the `VariationalDecoder`. A batch norm in the
      decoder uses its running statistics in phase 1, as the public code does.
    * `samples`: how many z_V are drawn per image; `metric_samples` of them enter `loss_fn`, one at
      a time.
    * `deviation_fn`: the log variance becomes the factor of the noise: `standard_deviation`, or
      `log_variance_as_deviation`, as in one version of the public code.
    * `reparameterized=False`: only the KL trains mean and variance, as in some public code.
      This, `learn_target` and `probe` switch a term or a gradient of a public code on or off.
    * `reconstruction_fn`: one of the three forms in `losses.py`.
    * `learn_target`: in a phase with `release`, f also learns to be reconstructed.
    * `lambdas`: the weights lambda_1 to lambda_4 of the four terms, in each phase.
    * `phase_at`: phase 2 begins at this step (0: there is no phase 1). The paper does not give the
      step; 1500 is from public code.
    * `release`: whether the gradient of the decoder reaches the heads and the backbone.
    * `train_decoder`: whether the decoder learns.
    * `decay`: adds `decay` / 2 times the squares of all weights and biases of backbone and heads,
      except batch norms, to loss_fn(z_I), so that lambda_4 weights it too.
    * `probe`: adds a softmax classifier of f, from which nothing else learns.
    """
    if len(lambdas) != 2 or any(len(weights) != 4 for weights in lambdas):
        raise ValueError(
            f"lambdas are four weights for phase 1 and four for phase 2, not {lambdas}"
        )
    for name, values in (("release", release), ("train_decoder", train_decoder)):
        if len(values) != 2:
            raise ValueError(f"{name} has one value for each of two phases, not {values}")
    if not 1 <= metric_samples <= samples:
        raise ValueError(f"metric_samples={metric_samples} must be from 1 to samples={samples}")

    heads = VariationalHeads(features=dim, variational=variational, norms=tuple(norms))
    encoder = _encoder(net, heads, pool_fn)
    mined_loss = base.with_miner(loss_fn, mine_fn)

    def decoder(width):
        module = VariationalDecoder(
            features=width, hidden=hidden, activation_fn=activation_fn, norm=decoder_norm
        )
        return assemble.modules(lambda run, z: run["decoder"](z), decoder=module)

    def init(key, batch, *, backbone=None):
        params, model_state, outputs = encoder.init(key, batch["images"])
        width = outputs["features"].shape[1]
        if variational:
            decoder_params, decoder_state, _ = decoder(width).init(
                jax.random.fold_in(key, 1000), outputs["invariant"]
            )
            params = {**params, **decoder_params}
            if decoder_state:
                batch_stats = model_state.get("batch_stats", {}) | decoder_state["batch_stats"]
                model_state = {**model_state, "batch_stats": batch_stats}
        if probe:
            params["probe"] = _probe_params(key, width, classes)
        return assemble.with_backbone(params, model_state, backbone)

    def sample(outputs, count, key):
        return sample_variations(
            outputs["mean"],
            outputs["log_variance"],
            samples=count,
            deviation_fn=deviation_fn,
            key=key,
        )

    def decode(params, model_state, f, z, in_phase_2):
        """Returns (reconstruction loss, model_state), in one program for both phases."""
        released, trained = (jnp.where(in_phase_2, x[1], x[0]) for x in (release, train_decoder))
        source = jnp.where(released, z, jax.lax.stop_gradient(z))
        target = jnp.where(released & learn_target, f, jax.lax.stop_gradient(f))
        decoder_params = params["decoder"]
        if not all(train_decoder):
            decoder_params = jax.tree.map(
                lambda x: jnp.where(trained, x, jax.lax.stop_gradient(x)), decoder_params
            )
        apply, variables = decoder(f.shape[1]).apply, {"decoder": decoder_params}
        decoded, new_state = apply(variables, model_state, source, train=True)
        if decoder_norm:
            decoded_by_running, _ = apply(variables, model_state, source, train=False)
            decoded, new_state = jax.tree.map(
                lambda batch, running: jnp.where(in_phase_2, batch, running),
                (decoded, new_state),
                (decoded_by_running, model_state),
            )
        return reconstruction_fn(target, decoded), new_state

    def loss(params, model_state, batch, *, key, step):
        images, labels = batch["images"], batch["labels"]
        in_phase_2 = step >= phase_at
        keys = [jax.random.fold_in(key, i) for i in range(4)]
        outputs, model_state = encoder.apply(params, model_state, images, train=True, key=keys[0])
        f, z_i = outputs["features"], outputs["invariant"]
        metrics = base.diagnostics(ops.normalize(z_i), labels)

        def metric(x, key):
            return mined_loss(x, labels, key=key, step=step)

        if variational:
            z_v = sample(outputs, samples, keys[1])
            if not reparameterized:
                z_v = jax.lax.stop_gradient(z_v)
            z = z_i[None, :, :] + z_v  # [t b d]
            metrics["kl"] = divergence(outputs["mean"], outputs["log_variance"])
            metrics["reconstruction"], model_state = decode(params, model_state, f, z, in_phase_2)
            metric_keys = jax.random.split(keys[2], metric_samples)
            variant_losses = jax.vmap(metric)(z[:metric_samples], metric_keys)
            metrics["metric_variant"] = jnp.mean(variant_losses)
        metrics["metric_invariant"] = metric(z_i, keys[3])
        first, second = (jnp.asarray(weights, jnp.float32) for weights in lambdas)
        weights = jnp.where(in_phase_2, second, first)
        weighted = {
            f"weighted/L{i + 1}": weights[i] * metrics[name]
            for i, name in enumerate(TERMS)
            if name in metrics
        }
        value = sum(weighted.values())
        if decay:
            squares = _sum_of_squares(params["net"]) + _sum_of_squares(params["heads"])
            metrics["decay"] = decay * squares / 2
            weighted_decay = weights[3] * metrics["decay"]
            weighted["weighted/L4"] += weighted_decay
            value = value + weighted_decay
        if probe:
            metrics["cross_entropy"] = _cross_entropy(params["probe"], f, labels)
            value = value + metrics["cross_entropy"]
        return value, (model_state, metrics | weighted)

    def embed(params, model_state, images):
        outputs, _ = encoder.apply(params, model_state, images, train=False)
        return ops.normalize(outputs["invariant"])

    if not variational:
        return base.Method(init, loss, embed, per_class=("probe",))

    def synthetic_features(params, model_state, images, *, key):
        outputs, _ = encoder.apply(params, model_state, images, train=False)
        f, z_i = outputs["features"], outputs["invariant"]
        z_v = sample(outputs, 1, key)
        z = z_i[None, :, :] + z_v  # [1 b d]
        decoded, _ = decoder(f.shape[1]).apply(params, model_state, z, train=False)
        return {
            "features": f,
            "reconstruction": decoded[0],
            "z_invariant": z_i,
            "z_variant": z_v[0],
            "synthetic": z[0],
        }

    inspect = base.Inspect(synthetic_features=synthetic_features)
    return base.Method(init, loss, embed, inspect=inspect, per_class=("probe",))


def _encoder(net: nn.Module, heads: nn.Module, pool_fn: Callable | None) -> assemble.Modules:
    """Connects backbone, pool and heads: images -> "features" and the outputs of the heads."""
    output, pool_fn = assemble.pooling(pool_fn)
    linen = {"net": net, "heads": heads}
    if pool_fn is not None:
        linen["pool"] = Head(features=None, pool_fn=pool_fn)

    def run_encoder(run, images):
        features = assemble.output_of(run["net"](images), output)
        if pool_fn is not None:
            features = run["pool"](features)["features"]
        features = ops.widen(features)
        return {"features": features, **run["heads"](features)}

    return assemble.modules(run_encoder, **linen)


def _probe_params(key: Array, width: int, classes: int) -> dict[str, Array]:
    kernel = initializers.glorot_uniform(jax.random.fold_in(key, 1001), (width, classes))
    return {"kernel": kernel, "bias": jnp.zeros(classes)}


def _cross_entropy(params: Mapping[str, Array], features: Array, labels: Array) -> Array:
    """Computes the loss of a softmax classifier on the features, without gradient for them."""
    logits = ops.matmul(jax.lax.stop_gradient(features), params["kernel"])
    logits = logits + params["bias"][None, :]
    of_label = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)
    return -jnp.mean(of_label)


def _sum_of_squares(tree: Mapping[str, Any]) -> Array:
    """Sums the squares of all parameters except those of norms: modules that have a "scale"."""
    if "scale" in tree:
        return jnp.zeros(())
    return sum(
        (_sum_of_squares(v) if isinstance(v, Mapping) else jnp.sum(v * v) for v in tree.values()),
        jnp.zeros(()),
    )
