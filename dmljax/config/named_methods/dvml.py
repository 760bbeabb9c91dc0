"""The method `dvml` of a config."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from dmljax import methods
from dmljax.config.named_methods.choices import Pool, choose, pool_fn_of
from dmljax.methods import base
from dmljax.methods.dvml import Phase, control, losses, nets

__all__ = ["dvml"]

_NORMS = {"none": (), "shared": nets.SHARED_NORM, "nested": nets.NESTED_NORMS}
_ACTIVATIONS = {"tanh": jnp.tanh, "relu": jax.nn.relu}
_FORMS = {
    "norm": losses.reconstruction_norm,
    "half_sum": losses.reconstruction_half_sum,
    "mean_square": losses.reconstruction_mean_square,
}
_RELEASES = {"second": (False, True), "never": (False, False), "always": (True, True)}
# The options that a mode sets where the config does not.
_MODES: dict[str, dict[str, Any]] = {
    "paper": {
        "dim": 512,
        "norms": "none",
        "samples": 20,
        "activation": "tanh",
        "decoder_norm": False,
        "form": "norm",
        "release": "second",
        "frozen_decoder": False,
        "decay": 0.0,
        "probe": False,
        "lambdas": ((1, 1, 0.1, 1), (0.8, 1, 0.2, 0.8)),
        "phase_at": 1500,
    },
    "seed": {
        "dim": 128,
        "norms": "nested",
        "samples": 1,
        "activation": "relu",
        "decoder_norm": True,
        "form": "half_sum",
        "release": "never",
        "frozen_decoder": False,
        "decay": 5e-3,
        "probe": True,
        "lambdas": ((1, 0.5, 0.5, 1), (0.8, 1, 0.4, 0.8)),
        "phase_at": 1600,
    },
    "report": {
        "dim": 128,
        "norms": "none",
        "samples": 1,
        "activation": "relu",
        "decoder_norm": False,
        "form": "norm",
        "release": "second",
        "frozen_decoder": True,
        "decay": 0.0,
        "probe": True,
        "lambdas": ((1, 0.5, 0.5, 1), (0.8, 1, 0.4, 0.8)),
        "phase_at": 1600,
    },
}


def dvml(
    net: nn.Module,
    loss_fn: Callable,
    *,
    classes: int,
    mine_fn: Callable | base.RandomMiner | None = None,
    mode: str = "paper",
    baseline: bool = False,
    dim: int | None = None,
    pool: Pool = "mean",
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
    frozen_decoder: bool | None = None,
    decay: float | None = None,
    probe: bool | None = None,
    lambdas: Sequence[Sequence[float]] | None = None,
    phase_at: int | None = None,
) -> base.Method:
    """`methods.dvml`; `mode` sets every option that is None.

    * `mode="paper"`: 512 dimensions, 20 samples, tanh in the decoder, no gradient out of the
      decoder in phase 1.
    * `mode="seed"`: the public code for Cars196. 128 dimensions after batch norms
      (`norms="nested"`), one sample, a decoder with relu and a batch norm that uses its running
      statistics in phase 1. No gradient ever leaves the decoder, so nothing separates z_I and z_V.
      A `probe` classifies f; nothing else learns from it.
    * `mode="report"`: what the report of that code describes. Layers without batch norms; one
      sample; the norm of the gap between f and its reconstruction, averaged over images; the
      decoder does not learn in phase 1, and in phase 2 its gradient reaches the embedding.
    * `baseline=True`: `methods.dvml.control`, the same without the variational part.
    * `norms`: "none", "shared" or "nested". `activation`: "tanh" or "relu". `form` of the
      reconstruction loss: "norm", "half_sum" or "mean_square".
    * `release`: the phases in which the gradient of the decoder reaches heads and backbone: the
      "second", "never" or "always".
    * `frozen_decoder=True`: the decoder does not learn in phase 1.
    """
    overrides = {"dim": dim, "norms": norms, "samples": samples, "activation": activation}
    overrides |= {"decoder_norm": decoder_norm, "form": form, "release": release, "decay": decay}
    overrides |= {"frozen_decoder": frozen_decoder, "probe": probe, "lambdas": lambdas}
    overrides |= {"phase_at": phase_at}
    options = dict(choose("mode", mode, _MODES))
    options |= {name: value for name, value in overrides.items() if value is not None}
    if len(options["lambdas"]) != 2:
        raise ValueError(
            f"lambdas are four weights for phase 1 and four for phase 2, not {options['lambdas']}"
        )
    releases = choose("release", options["release"], _RELEASES)
    phases = [
        Phase(
            lambdas=options["lambdas"][i],
            release=releases[i],
            train_decoder=i == 1 or not options["frozen_decoder"],
            decoder_statistics=i == 1,
        )
        for i in range(2)
    ]
    common: dict[str, Any] = {
        "classes": classes,
        "mine_fn": mine_fn,
        "pool_fn": pool_fn_of(pool),
        "heads": nets.VariationalHeads(
            features=options["dim"],
            variational=not baseline,
            norms=choose("norms", options["norms"], _NORMS),
        ),
        "phases": phases,
        "phase_at": options["phase_at"],
        "decay": options["decay"],
        "probe": options["probe"],
    }
    if baseline:
        return control(net, loss_fn, **common)
    return methods.dvml(
        net,
        loss_fn,
        decoder_fn=functools.partial(
            nets.VariationalDecoder,
            hidden=hidden,
            activation_fn=choose("activation", options["activation"], _ACTIVATIONS),
            norm=options["decoder_norm"],
        ),
        samples=options["samples"],
        metric_samples=metric_samples,
        reparameterized=reparameterized,
        reconstruction_fn=choose("form", options["form"], _FORMS),
        learn_target=learn_target,
        **common,
    )
