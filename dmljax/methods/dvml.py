"""Deep variational metric learning (DVML; Lin et al., ECCV 2018).

Variation within a class is modeled as noise. The features f `[b c]` of the backbone become an
invariant embedding z_I, used at test time, and the mean and log variance of z_V, the variation
within a class. A decoder restores f from z = z_I + z_V.

`n_pairs` is the loss 'dmljax.methods.dvml:n_pairs' of a config.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float

from dmljax import losses, ops
from dmljax.methods import assemble, base
from dmljax.nets import initializers
from dmljax.nets.heads import Head
from dmljax.nets.layers import BatchNorm, glorot_dense
from dmljax.ops import Array, Labels

__all__ = [
    "VariationalDecoder",
    "VariationalHeads",
    "divergence",
    "dvml",
    "log_variance_as_deviation",
    "n_pairs",
    "reconstruction_half_sum",
    "reconstruction_mean_square",
    "reconstruction_norm",
    "standard_deviation",
]

SHARED_NORM = ("norm",)
NESTED_NORMS = ("norm", "norm_mean", "norm_log_variance")
TERMS = ("kl", "reconstruction", "metric_variant", "metric_invariant")
_batch_norm = functools.partial(BatchNorm, momentum=0.01, epsilon=1e-3)  # as in published code


class VariationalHeads(nn.Module, kw_only=True):
    """Three linear layers of the features: "invariant", "mean" and "log_variance", each `[b d]`.

    * `features`: d.
    * `variational=False` leaves out the mean and the log variance.
    * `norms`: the names of the batch norms. The paper has none; `SHARED_NORM` is one before all
      three layers; `NESTED_NORMS` adds one before the mean and one before the log variance, as
      published code for 128 dimensions does.
    """

    features: int = 512
    variational: bool = True
    norms: tuple[str, ...] = ()

    @nn.compact
    def __call__(self, features: Float[Array, "b c"], *, train: bool) -> dict[str, Array]:
        if unknown := sorted(set(self.norms) - set(NESTED_NORMS)):
            raise ValueError(f"norms can be {', '.join(NESTED_NORMS)}, not {unknown[0]!r}")

        def norm(x, name):
            if name not in self.norms:
                return x
            return _batch_norm(name=name)(x, train=train)

        x = norm(ops.widen(features), "norm")
        outputs: dict[str, Array] = {}
        for name in ("invariant", "mean", "log_variance") if self.variational else ("invariant",):
            linear = glorot_dense(self.features, name=name)
            outputs[name] = ops.widen(linear(norm(x, f"norm_{name}")))
        return outputs


def standard_deviation(log_variance: Float[Array, "b d"]) -> Float[Array, "b d"]:
    """Computes exp(log_variance / 2), limited to between exp(-10) and exp(10)."""
    # The divergence sees the log variance itself and pulls it back from beyond this range.
    return jnp.exp(jnp.clip(log_variance, -20, 20) / 2)


def log_variance_as_deviation(log_variance: Float[Array, "b d"]) -> Float[Array, "b d"]:
    """Returns the log variance itself, by which one version of the public code scales its noise."""
    return log_variance


def sample_variations(
    mean: Float[Array, "b d"],
    log_variance: Float[Array, "b d"],
    *,
    samples: int = 20,
    deviation_fn: Callable = standard_deviation,
    key: jax.Array,
) -> Float[Array, "t b d"]:
    """Draws t samples z_V = mean + std N(0, 1), with gradients to both arguments."""
    noise = jax.random.normal(key, (samples, *mean.shape), mean.dtype)
    return mean[None, :, :] + deviation_fn(log_variance)[None, :, :] * noise


class VariationalDecoder(nn.Module, kw_only=True):
    """From z to the features of the backbone: linear layer, `activation_fn`, linear layer.

    The paper has tanh between the two. No activation follows: the features are means of ReLUs and
    exceed 1.

    * `features`: width of the features. `hidden`: width between the layers.
    * `norm=True` adds a batch norm after the activation, as the published code does, which has
      `activation_fn=jax.nn.relu`.
    """

    features: int = 1024
    hidden: int = 512
    activation_fn: Callable = jnp.tanh
    norm: bool = False

    @nn.compact
    def __call__(self, z: Float[Array, "*t b d"], *, train: bool) -> Float[Array, "*t b c"]:
        x = self.activation_fn(glorot_dense(self.hidden, name="fc1")(z))
        if self.norm:
            x = _batch_norm(name="norm")(x, train=train)
        return ops.widen(glorot_dense(self.features, name="fc2")(x))


def divergence(mean: Float[Array, "b d"], log_variance: Float[Array, "b d"]) -> Float[Array, ""]:
    """Computes KL(N(mean, variance) | N(0, 1)), summed over dimensions, averaged over the batch.

    (variance + mean^2 - log variance - 1) / 2. Equation 8 of Lin et al. (ECCV 2018) prints its
    negative, and other public code divides by the batch twice.
    """
    # Above exp(20) the variance continues as a straight line: exp would overflow, and the gradient
    # still pulls the variance back.
    variance = jnp.exp(jnp.minimum(log_variance, 20)) * (1 + jax.nn.relu(log_variance - 20))
    terms = (variance + mean**2 - log_variance - 1) / 2
    return jnp.mean(jnp.sum(terms, axis=1))


def reconstruction_norm(
    features: Float[Array, "b c"], decoded: Float[Array, "t b c"]
) -> Float[Array, ""]:
    """Computes the mean of |f - f'| over the batch and t samples (Lin et al., ECCV 2018, eq. 9)."""
    return jnp.mean(ops.sqrt(jnp.sum(_squares(features, decoded), axis=2)))


def reconstruction_half_sum(
    features: Float[Array, "b c"], decoded: Float[Array, "t b c"]
) -> Float[Array, ""]:
    """Sums (f - f')^2 / 2 over batch and dimensions, averaged over t samples, as in public code.

    It grows with the batch and is 1e3 to 1e5 times as large as `reconstruction_norm`.
    """
    return jnp.mean(jnp.sum(_squares(features, decoded), axis=(1, 2))) / 2


def reconstruction_mean_square(
    features: Float[Array, "b c"], decoded: Float[Array, "t b c"]
) -> Float[Array, ""]:
    """Averages (f - f')^2 over samples, batch and dimensions, as in other public code."""
    return jnp.mean(_squares(features, decoded))


def n_pairs(
    embeddings: Float[Array, "b d"],
    labels: Labels,
    *,
    l2_weight: float = 3e-3,
    where: Bool[Array, "b"] | None = None,
) -> Float[Array, ""]:
    """Computes `losses.n_pairs` without normalization of embeddings (Sohn, NeurIPS 2016).

    Adds `l2_weight` / 4 times the mean squared norms of anchors and of positives. The predecessor
    of DVML's public code uses 3e-3, and recommends 1.5e-2 for CUB.
    """
    return losses.n_pairs(embeddings, labels, l2_weight=l2_weight, distance_fn=ops.dot, where=where)


def _squares(features, decoded):
    gaps = decoded - features[None, :, :]
    return gaps * gaps


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
    * `reconstruction_fn`: one of the three forms above.
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
    widths = [len(weights) for weights in lambdas]
    if widths != [4, 4] or not len(release) == len(train_decoder) == 2:
        raise ValueError(
            f"lambdas={lambdas} are four weights for phase 1 and four for phase 2; "
            f"release={release} and train_decoder={train_decoder} have one value for each phase"
        )
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

    def sample(outputs, samples, key):
        options = {"samples": samples, "deviation_fn": deviation_fn, "key": key}
        return sample_variations(outputs["mean"], outputs["log_variance"], **options)

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
