"""The method DVML: variation within a class is modeled as noise (Lin et al., ECCV 2018).

The features f of the backbone become z_I, which alone is used at test time, and the mean and the
variance of z_V, the variation within a class. A decoder restores f from z = z_I + z_V.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from dmljax import ops
from dmljax.methods import assemble, base
from dmljax.methods.dvml.losses import divergence, reconstruction_norm
from dmljax.methods.dvml.nets import VariationalDecoder, VariationalHeads, sample_variations
from dmljax.nets import initializers
from dmljax.nets.heads import Head
from dmljax.ops import Array

__all__ = ["PAPER_PHASES", "Phase", "control", "dvml"]


class Phase(NamedTuple):
    """The settings of one of the two phases of training.

    * `lambdas`: the weights lambda_1 to lambda_4 of the four terms.
    * `release`: the decoder's gradient reaches the heads and the backbone.
    * `train_decoder`: the decoder learns.
    * `decoder_statistics`: a batch norm in the decoder uses the statistics of the batch; otherwise
      it uses its running statistics.
    """

    lambdas: Sequence[float]
    release: bool
    train_decoder: bool = True
    decoder_statistics: bool = True


PAPER_PHASES = (
    Phase((1, 1, 0.1, 1), release=False, decoder_statistics=False),
    Phase((0.8, 1, 0.2, 0.8), release=True),
)


def dvml(
    net: nn.Module,
    loss_fn: Callable,
    *,
    classes: int,
    mine_fn: Callable | base.RandomMiner | None = None,
    pool_fn: Callable | None = None,
    heads: nn.Module | None = None,
    decoder_fn: Callable[..., nn.Module] = VariationalDecoder,
    samples: int = 20,
    metric_samples: int = 1,
    reparameterized: bool = True,
    reconstruction_fn: Callable = reconstruction_norm,
    learn_target: bool = False,
    phases: Sequence[Phase] = PAPER_PHASES,
    phase_at: int = 1500,
    decay: float = 0.0,
    probe: bool = False,
) -> base.Method:
    """lambda_1 KL + lambda_2 |f - decoder(z)| + lambda_3 loss_fn(z, y) + lambda_4 loss_fn(z_I, y).

    The metrics are these terms before weighting: "kl", "reconstruction", "metric_variant" (of z),
    "metric_invariant" (of z_I), and, if they are on, "decay" and "cross_entropy" (of the probe). An
    optimizer group with the path "^decoder/" or "^probe/" gives these parameters another learning
    rate.

    * `loss_fn`, `mine_fn`: any pair loss.
    * `pool_fn`: how a map becomes the features f; see `assemble.encoder`.
    * `heads`: a `VariationalHeads`; None takes that of the paper, with 512 dimensions.
    * `decoder_fn(features=...)` makes the decoder; `features` is the width of f.
    * `samples`: how many z_V are drawn per image; `metric_samples` of them enter `loss_fn`, one at
      a time.
    * `reparameterized=False`: only the KL trains mean and variance, as in some public code.
      This, `learn_target` and `probe` switch a term or a gradient of a public code on or off.
    * `reconstruction_fn`: one of the three forms in `losses.py`.
    * `learn_target`: in a phase with `release`, f also learns to be reconstructed.
    * `phases`, `phase_at`: phase 2 begins at step `phase_at` (0: there is no phase 1). The paper
      does not give the step; 1500 is from public code.
    * `decay`: adds `decay` / 2 times the squares of all weights and biases of backbone and heads,
      except batch norms, to loss_fn(z_I), so that lambda_4 weights it too.
    * `probe`: adds a softmax classifier of f, from which nothing else learns.
    """
    heads = VariationalHeads() if heads is None else heads
    _check_phases(phases)
    if not 1 <= metric_samples <= samples:
        raise ValueError(f"metric_samples={metric_samples} must be from 1 to samples={samples}")

    encoder = _encoder(net, heads, pool_fn)
    mined_loss = base.with_miner(loss_fn, mine_fn)

    def decoder(width):
        module = decoder_fn(features=width)
        return assemble.modules(lambda run, z: run["decoder"](z), decoder=module)

    def init(key, batch, *, backbone=None):
        params, model_state, outputs = encoder.init(key, batch["images"])
        width = outputs["features"].shape[1]
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

    def decode(params, model_state, f, z, in_phase_2):
        """(reconstruction loss, model_state): in one program for both phases."""
        first_phase, second_phase = phases
        released = jnp.where(in_phase_2, second_phase.release, first_phase.release)
        source = jnp.where(released, z, jax.lax.stop_gradient(z))
        target = jnp.where(released & learn_target, f, jax.lax.stop_gradient(f))
        decoder_params = params["decoder"]
        if not (first_phase.train_decoder and second_phase.train_decoder):
            trained = jnp.where(in_phase_2, second_phase.train_decoder, first_phase.train_decoder)
            decoder_params = jax.tree.map(
                lambda x: jnp.where(trained, x, jax.lax.stop_gradient(x)), decoder_params
            )
        apply, variables = decoder(f.shape[1]).apply, {"decoder": decoder_params}
        decoded, new_state = apply(variables, model_state, source, train=True)
        has_norm = "decoder" in model_state.get("batch_stats", {})
        if has_norm and not (first_phase.decoder_statistics and second_phase.decoder_statistics):
            of_batch = jnp.where(
                in_phase_2, second_phase.decoder_statistics, first_phase.decoder_statistics
            )
            decoded_by_running, _ = apply(variables, model_state, source, train=False)
            decoded, new_state = jax.tree.map(
                lambda batch, running: jnp.where(of_batch, batch, running),
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
        z_v = sample_variations(
            outputs["mean"], outputs["log_variance"], samples=samples, key=keys[1]
        )
        if not reparameterized:
            z_v = jax.lax.stop_gradient(z_v)
        z = z_i[None, :, :] + z_v  # [t b d]
        reconstruction, model_state = decode(params, model_state, f, z, in_phase_2)

        def metric(x, key):
            return mined_loss(x, labels, key=key, step=step)

        metric_keys = jax.random.split(keys[2], metric_samples)
        variant_losses = jax.vmap(metric)(z[:metric_samples], metric_keys)
        metrics = base.diagnostics(base.unit_vectors(z_i), labels)
        metrics["kl"] = divergence(outputs["mean"], outputs["log_variance"])
        metrics["reconstruction"] = reconstruction
        metrics["metric_variant"] = jnp.mean(variant_losses)
        metrics["metric_invariant"] = metric(z_i, keys[3])
        names = ("kl", "reconstruction", "metric_variant", "metric_invariant")
        first_lambdas, second_lambdas = (jnp.asarray(p.lambdas, jnp.float32) for p in phases)
        lambdas = jnp.where(in_phase_2, second_lambdas, first_lambdas)
        value = sum(lambdas[i] * metrics[name] for i, name in enumerate(names))
        if decay:
            squares = _sum_of_squares(params["net"]) + _sum_of_squares(params["heads"])
            metrics["decay"] = decay * squares / 2
            value = value + lambdas[3] * metrics["decay"]
        if probe:
            metrics["cross_entropy"] = _cross_entropy(params["probe"], f, labels)
            value = value + metrics["cross_entropy"]
        return value, (model_state, metrics)

    def embed(params, model_state, images):
        outputs, _ = encoder.apply(params, model_state, images, train=False)
        return base.unit_vectors(outputs["invariant"])

    def synthetic_features(params, model_state, images, *, key):
        outputs, _ = encoder.apply(params, model_state, images, train=False)
        f, z_i = outputs["features"], outputs["invariant"]
        z_v = sample_variations(outputs["mean"], outputs["log_variance"], samples=1, key=key)
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
    return base.Method(init, loss, embed, inspect=inspect)


def control(
    net: nn.Module,
    loss_fn: Callable,
    *,
    classes: int,
    mine_fn: Callable | base.RandomMiner | None = None,
    pool_fn: Callable | None = None,
    heads: nn.Module | None = None,
    phases: Sequence[Phase] = PAPER_PHASES,
    phase_at: int = 1500,
    decay: float = 0.0,
    probe: bool = False,
) -> base.Method:
    """lambda_4 loss_fn(z_I, y): `dvml` without its variational part, as its control.

    Everything else is that of `dvml`: the layer of z_I and its batch norm, the decay inside the
    loss, lambda_4 and its two phases, and the probe. Arguments are as in `dvml`; `heads` is a
    `VariationalHeads` with `variational=False`.
    """
    heads = VariationalHeads(variational=False) if heads is None else heads
    _check_phases(phases)
    encoder = _encoder(net, heads, pool_fn)
    mined_loss = base.with_miner(loss_fn, mine_fn)

    def init(key, batch, *, backbone=None):
        params, model_state, outputs = encoder.init(key, batch["images"])
        if probe:
            params["probe"] = _probe_params(key, outputs["features"].shape[1], classes)
        return assemble.with_backbone(params, model_state, backbone)

    def loss(params, model_state, batch, *, key, step):
        labels = batch["labels"]
        keys = [jax.random.fold_in(key, i) for i in range(4)]  # as in `dvml`
        outputs, model_state = encoder.apply(
            params, model_state, batch["images"], train=True, key=keys[0]
        )
        z_i = outputs["invariant"]
        metrics = base.diagnostics(base.unit_vectors(z_i), labels)
        metrics["metric_invariant"] = mined_loss(z_i, labels, key=keys[3], step=step)
        value = metrics["metric_invariant"]
        if decay:
            squares = _sum_of_squares(params["net"]) + _sum_of_squares(params["heads"])
            metrics["decay"] = decay * squares / 2
            value = value + metrics["decay"]
        value = jnp.where(step >= phase_at, phases[1].lambdas[3], phases[0].lambdas[3]) * value
        if probe:
            metrics["cross_entropy"] = _cross_entropy(params["probe"], outputs["features"], labels)
            value = value + metrics["cross_entropy"]
        return value, (model_state, metrics)

    def embed(params, model_state, images):
        outputs, _ = encoder.apply(params, model_state, images, train=False)
        return base.unit_vectors(outputs["invariant"])

    return base.Method(init, loss, embed)


def _encoder(net: nn.Module, heads: nn.Module, pool_fn: Callable | None) -> assemble.Modules:
    """Backbone, pool and heads: images -> "features" and the outputs of the heads."""
    output, pool_fn = assemble.pooling(pool_fn)
    linen = {"net": net, "heads": heads}
    if pool_fn is not None:
        linen["pool"] = Head(features=None, pool_fn=pool_fn)

    def run_encoder(run, images):
        features = run["net"](images)[output]
        if pool_fn is not None:
            features = run["pool"](features)["features"]
        features = ops.widen(features)
        return {"features": features, **run["heads"](features)}

    return assemble.modules(run_encoder, **linen)


def _check_phases(phases: Sequence[Phase]) -> None:
    if len(phases) != 2 or any(len(phase.lambdas) != 4 for phase in phases):
        raise ValueError(
            "lambdas are four weights for phase 1 and four for phase 2, not "
            f"{tuple(phase.lambdas for phase in phases)}"
        )


def _probe_params(key: Array, width: int, classes: int) -> dict[str, Array]:
    kernel = initializers.glorot_uniform(jax.random.fold_in(key, 1001), (width, classes))
    return {"kernel": kernel, "bias": jnp.zeros(classes)}


def _cross_entropy(params: Mapping[str, Array], features: Array, labels: Array) -> Array:
    """Of a softmax classifier of the features, which get no gradient from it."""
    logits = ops.matmul(jax.lax.stop_gradient(features), params["kernel"])
    logits = logits + params["bias"][None, :]
    of_label = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)
    return -jnp.mean(of_label)


def _sum_of_squares(tree: Mapping[str, Any]) -> Array:
    """Sum of the squares of all parameters, except of norms: modules that have a "scale"."""
    if "scale" in tree:
        return jnp.zeros(())
    return sum(
        (_sum_of_squares(v) if isinstance(v, Mapping) else jnp.sum(v * v) for v in tree.values()),
        jnp.zeros(()),
    )
