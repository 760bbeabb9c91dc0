"""Deep variational metric learning (Lin et al., ECCV 2018): what varies within a class is noise.

The backbone's features f become z_I, alone used at test time, and the mean and variance of what
varies, z_V. A decoder makes f again of z = z_I + z_V. With `loss_fn` as the metric loss Lm,

    lambda_1 KL(z_V | N(0, 1)) + lambda_2 |f - decoder(z)| + lambda_3 Lm(z) + lambda_4 Lm(z_I)

in two phases: the decoder's gradient reaches what is before it only in the second. `n_pairs` goes
into a config as 'dmljax.methods.dvml:n_pairs'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from dmljax import ops
from dmljax.methods import base
from dmljax.methods.dvml.losses import divergence, reconstruction
from dmljax.methods.dvml.nets import VariationalDecoder, VariationalHeads, sample_variations
from dmljax.nets import initializers
from dmljax.nets.heads import Head
from dmljax.ops import Array

__all__ = ["dvml"]


_PAPER: dict[str, Any] = {
    "dim": 512,
    "norms": "none",
    "samples": 20,
    "activation": "tanh",
    "decoder_norm": False,
    "form": "norm",
    "release": "second",
    "decay": 0.0,
    "probe": False,
    "lambdas": ((1, 1, 0.1, 1), (0.8, 1, 0.2, 0.8)),
    "phase_at": 1500,
}
_SEED: dict[str, Any] = {
    "dim": 128,
    "norms": "nested",
    "samples": 1,
    "activation": "relu",
    "decoder_norm": True,
    "form": "half_sum",
    "release": "never",
    "decay": 5e-3,
    "probe": True,
    "lambdas": ((1, 0.5, 0.5, 1), (0.8, 1, 0.4, 0.8)),
    "phase_at": 1600,
}
_MODES = {"paper": _PAPER, "seed": _SEED}
_ACTIVATIONS = {"tanh": jnp.tanh, "relu": jax.nn.relu}


def dvml(
    net: nn.Module,
    loss_fn: Callable,
    *,
    classes: int,
    mine_fn: Callable | base.RandomMiner | None = None,
    mode: str = "paper",
    dim: int | None = None,
    pool: Any = "mean",
    norms: str | None = None,
    samples: int | None = None,
    metric_samples: int = 1,
    reparameterized: bool = True,
    hidden: int = 512,
    activation: str | None = None,
    decoder_norm: bool | None = None,
    form: str | None = None,
    release: str | None = None,
    learn_target: bool = False,
    frozen_decoder: bool = False,
    decay: float | None = None,
    probe: bool | None = None,
    lambdas: Sequence[Sequence[float]] | None = None,
    phase_at: int | None = None,
) -> base.Method:
    """DVML around any pair loss; `mode` sets what is not given.

    * 'paper': 512 dimensions, `samples` 20, tanh in the decoder, its gradient cut in phase 1.
    * 'seed': the public code for Cars196. 128 dimensions behind batch norms (`norms='nested'`), one
      sample, a decoder with relu and a batch norm that keeps to its running statistics in phase 1.
      The decoder's gradient never reaches the rest, whatever the phase, so that nothing pulls z_I
      and z_V apart. A `probe` classifies f by softmax, of which the rest learns nothing either.

    What the two differ in, and what the paper leaves open:

    * `lambdas`: the four weights in phase 1 and in phase 2, which begins at step `phase_at` (0:
      there is no phase 1). The paper does not say when; another public code has 1500.
    * `release`: when the decoder's gradient reaches the heads and the backbone: in the 'second'
      phase, 'never', or 'always'. The features that it aims at get one with `learn_target=True`.
    * `frozen_decoder=True`: no decoder is learned in phase 1, as a report says and its code denies.
    * `pool`: how a map becomes the features f (the mean, in both).
    * `metric_samples`: how many of the samples the metric loss sees, one by one.
    * `reparameterized=False`: only the KL moves mean and variance, as in some public code.
    * `form`: see `reconstruction`. `norms`, `activation`, `decoder_norm`: see `dvml/nets.py`.
    * `decay`: of the backbone and the heads, biases too, norms not: `decay` / 2 times the squares
      is added to Lm(z_I), and so weighed by lambda_4.

    All losses are logged as they are before the lambdas weigh them: 'kl', 'reconstruction',
    'metric_variant' (of z), 'metric_invariant' (of z_I), 'decay', 'probe'. The decoder is
    'decoder/', the probe 'probe/' for learning rates of their own in `optimizer.groups`.
    """
    if mode not in _MODES:
        raise ValueError(f"mode is 'paper' or 'seed', not {mode!r}")
    given = {"dim": dim, "norms": norms, "samples": samples, "activation": activation}
    given |= {"decoder_norm": decoder_norm, "form": form, "release": release, "decay": decay}
    given |= {"probe": probe, "lambdas": lambdas, "phase_at": phase_at}
    o = _MODES[mode] | {k: v for k, v in given.items() if v is not None}
    _check(o, metric_samples)

    output, pool = base.pooling(pool)
    parts = {"net": net, "heads": VariationalHeads(features=o["dim"], norms=o["norms"])}
    if pool is not None:
        parts["pool"] = Head(features=None, pool=pool)

    def forward(run, images):
        features = run["net"](images)[output]
        if pool is not None:
            features = run["pool"](features)["features"]
        features = ops.widen(features)
        return {"features": features, **run["heads"](features)}

    encoder = base.modules(forward, **parts)
    loss_fn = base.with_miner(loss_fn, mine_fn)

    def decoder(width):
        whole = VariationalDecoder(
            features=width,
            hidden=hidden,
            activation_fn=_ACTIVATIONS[o["activation"]],
            norm=o["decoder_norm"],
        )
        return base.modules(lambda run, z: run["decoder"](z), decoder=whole)

    def init(key, batch, *, backbone=None):
        params, model_state, outputs = encoder.init(key, batch["images"])
        width = outputs["features"].shape[1]
        z = outputs["invariant"]
        more, stats, _ = decoder(width).init(jax.random.fold_in(key, 1000), z)
        params = {**params, **more}
        if stats:
            merged = {**model_state.get("batch_stats", {}), **stats["batch_stats"]}
            model_state = {**model_state, "batch_stats": merged}
        if o["probe"]:
            kernel = initializers.glorot_uniform(jax.random.fold_in(key, 1001), (width, classes))
            params["probe"] = {"kernel": kernel, "bias": jnp.zeros(classes)}
        return base.with_backbone(params, model_state, backbone)

    def loss(params, model_state, batch, *, key, step):
        images, labels = batch["images"], batch["labels"]
        second = step >= o["phase_at"]
        keys = [jax.random.fold_in(key, i) for i in range(4)]
        outputs, model_state = encoder.apply(params, model_state, images, train=True, key=keys[0])
        f, z_i = outputs["features"], outputs["invariant"]
        z_v = sample_variations(
            outputs["mean"], outputs["log_variance"], samples=o["samples"], key=keys[1]
        )
        if not reparameterized:
            z_v = jax.lax.stop_gradient(z_v)
        z = z_i[None, :, :] + z_v  # [t b d]

        released = {"second": second, "never": False, "always": True}[o["release"]]
        source = jnp.where(released, z, jax.lax.stop_gradient(z))
        target = jnp.where(released & learn_target, f, jax.lax.stop_gradient(f))
        own = params["decoder"]
        if frozen_decoder:
            own = jax.tree.map(lambda x: jnp.where(second, x, jax.lax.stop_gradient(x)), own)
        decode = decoder(f.shape[1]).apply
        decoded, after = decode({"decoder": own}, model_state, source, train=True)
        if o["decoder_norm"]:
            still, _ = decode({"decoder": own}, model_state, source, train=False)
            decoded, after = jax.tree.map(
                lambda new, old: jnp.where(second, new, old), (decoded, after), (still, model_state)
            )
        model_state = after

        def metric(x, key):
            return loss_fn(x, labels, key=key)

        each = jax.vmap(metric)(z[:metric_samples], jax.random.split(keys[2], metric_samples))
        metrics = base.diagnostics(base.unit_vectors(z_i), labels)
        metrics["kl"] = divergence(outputs["mean"], outputs["log_variance"])
        metrics["reconstruction"] = reconstruction(target, decoded, form=o["form"])
        metrics["metric_variant"] = jnp.mean(each)
        metrics["metric_invariant"] = metric(z_i, keys[3])
        names = ("kl", "reconstruction", "metric_variant", "metric_invariant")
        first, then = (jnp.asarray(row, jnp.float32) for row in o["lambdas"])
        weights = jnp.where(second, then, first)
        value = sum(weights[i] * metrics[name] for i, name in enumerate(names))
        if o["decay"]:
            squares = _squares(params["net"]) + _squares(params["heads"])
            metrics["decay"] = o["decay"] * squares / 2
            value = value + weights[3] * metrics["decay"]
        if o["probe"]:
            logits = ops.matmul(jax.lax.stop_gradient(f), params["probe"]["kernel"])
            logits = logits + params["probe"]["bias"][None, :]
            own = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)
            metrics["probe"] = -jnp.mean(own)
            value = value + metrics["probe"]
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


def _check(o: Mapping[str, Any], metric_samples: int) -> None:
    for name, allowed in (
        ("activation", tuple(_ACTIVATIONS)),
        ("release", ("second", "never", "always")),
    ):
        if o[name] not in allowed:
            raise ValueError(f"{name} is one of {', '.join(allowed)}, not {o[name]!r}")
    if [len(row) for row in o["lambdas"]] != [4, 4]:
        raise ValueError(
            f"lambdas are four weights for phase 1 and four for phase 2, not {o['lambdas']}"
        )
    if not 1 <= metric_samples <= o["samples"]:
        raise ValueError(
            f"metric_samples={metric_samples} must be from 1 to samples={o['samples']}"
        )


def _squares(tree: Mapping[str, Any]) -> Array:
    """Sum of the squares of all parameters but those of norms, which are told by their scale."""
    if "scale" in tree:
        return jnp.zeros(())
    return sum(
        (_squares(v) if isinstance(v, Mapping) else jnp.sum(v * v) for v in tree.values()),
        jnp.zeros(()),
    )
