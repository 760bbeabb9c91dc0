"""Proxy losses, computed one row and one class at a time."""

import functools
import math

import jax
import numpy as np
import pytest

from dmljax import losses

CENTERED = {"subcenter_arcface", "soft_triple"}


def _cos(x, w):
    return x @ w / math.sqrt((x @ x) * (w @ w))


def cross_entropy(logits, label):
    peak = max(logits)
    return peak + math.log(sum(math.exp(z - peak) for z in logits)) - logits[label]


def _by_row(logits_fn):
    """The mean cross-entropy of `logits_fn(x, label, proxies, **options)`."""

    def value(x, labels, proxies, **options):
        logits = [logits_fn(row, y, proxies, **options) for row, y in zip(x, labels, strict=True)]
        return sum(map(cross_entropy, logits, labels)) / len(x)

    return value


def _arcface(cosines, label, margin=28.6, scale=64):
    m = math.radians(margin)
    z = list(cosines)
    t = math.acos(z[label])
    z[label] = math.cos(t + m) if t <= math.pi - m else z[label] - m * math.sin(m)
    return [scale * s for s in z]


def _psi(cosines, label, margin):
    z = list(cosines)
    t = math.acos(z[label])
    k = math.floor(t / (math.pi / margin))
    z[label] = (-1) ** k * math.cos(margin * t) - 2 * k
    return z


def _soft(x, centers, gamma):
    cosines = [_cos(x, w) for w in centers]
    shares = [math.exp(s / gamma) for s in cosines]
    return sum(e * s for e, s in zip(shares, cosines, strict=True)) / sum(shares)


def _soft_triple(x, label, proxies, scale=20, gamma=0.1, margin=0.01):
    z = [_soft(x, centers, gamma) for centers in proxies]
    z[label] -= margin
    return [scale * s for s in z]


def _cosface(x, label, proxies, margin=0.35, scale=64):
    return [scale * (_cos(x, w) - margin * (c == label)) for c, w in enumerate(proxies)]


def naive_proxy_anchor(x, labels, proxies, margin=0.1, alpha=32):
    pull = push = 0
    for c, w in enumerate(proxies):
        cosines = [(_cos(row, w), y == c) for row, y in zip(x, labels, strict=True)]
        pos = [math.exp(-alpha * (s - margin)) for s, is_same in cosines if is_same]
        neg = [math.exp(alpha * (s + margin)) for s, is_same in cosines if not is_same]
        pull += math.log(1 + sum(pos))
        push += math.log(1 + sum(neg))
    return pull / len(set(labels)) + push / len(proxies)


def _squares(x, w):
    gap = x / math.sqrt(x @ x) - w / math.sqrt(w @ w)
    return gap @ gap


def _norm(x):
    return math.sqrt(x @ x)


NAIVE = {
    "normalized_softmax": _by_row(
        lambda x, y, ws, temperature=0.05: [_cos(x, w) / temperature for w in ws]
    ),
    "cosface": _by_row(_cosface),
    "arcface": _by_row(
        lambda x, y, ws, **options: _arcface([_cos(x, w) for w in ws], y, **options)
    ),
    "subcenter_arcface": _by_row(
        lambda x, y, ws, **options: _arcface(
            [max(_cos(x, w) for w in centers) for centers in ws], y, **options
        )
    ),
    "sphereface": _by_row(
        lambda x, y, ws, margin=4, scale=1: [
            scale * _norm(x) * z for z in _psi([_cos(x, w) for w in ws], y, margin)
        ]
    ),
    "large_margin_softmax": _by_row(
        lambda x, y, ws, margin=4, scale=1: [
            scale * _norm(x) * _norm(w) * z
            for w, z in zip(ws, _psi([_cos(x, w) for w in ws], y, margin), strict=True)
        ]
    ),
    "soft_triple": _by_row(_soft_triple),
    "proxy_anchor": naive_proxy_anchor,
    "proxy_nca": _by_row(lambda x, y, ws, scale=1: [-scale * _squares(x, w) for w in ws]),
    "proxy_nca_pp": _by_row(
        lambda x, y, ws, temperature=1 / 9: [-_squares(x, w) / temperature for w in ws]
    ),
}


# All options of each loss, at other values than their defaults.
OPTIONS = {
    "normalized_softmax": {"temperature": 0.3},
    "cosface": {"margin": 0.2, "scale": 8.0},
    "arcface": {"margin": 50.0, "scale": 8.0},
    "subcenter_arcface": {"margin": 50.0, "scale": 8.0},
    "sphereface": {"margin": 3, "scale": 2.0},
    "large_margin_softmax": {"margin": 2, "scale": 3.0},
    "soft_triple": {"scale": 8.0, "gamma": 0.5, "margin": 0.2},
    "proxy_anchor": {"margin": 0.3, "alpha": 8.0},
    "proxy_nca": {"scale": 4.0},
    "proxy_nca_pp": {"temperature": 0.5},
}


NAMES = sorted(NAIVE)


each_loss = pytest.mark.parametrize("name", NAMES)


def proxy_data(name, b=6, c=4, d=3, k=2, dtype=np.float32):
    rng = np.random.default_rng(3)
    x = rng.normal(size=(b, d)).astype(dtype)
    w = rng.normal(size=(c, k, d) if name in CENTERED else (c, d)).astype(dtype)
    return x, np.array([0, 0, 1, 2, 2, 0])[:b], w


@functools.cache
def compiled(name, **keywords):
    """Value and both gradients."""

    def loss(x, proxies, labels, where):
        return getattr(losses, name)(x, labels, proxies, where=where, **keywords)

    compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    return lambda x, w, y, where=None: compiled(
        x, w, y, np.ones(len(x), bool) if where is None else where
    )
