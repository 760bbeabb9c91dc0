"""Ranking losses by loops."""

import functools

import jax
import numpy as np
import pytest
from scipy.special import expit

from dmljax import losses

PNP = {name: getattr(losses.pnp_penalties, name) for name in losses.pnp_penalties.__all__}
PNP |= {
    "dq": functools.partial(losses.pnp_penalties.dq, alpha=1.5),
    "ib": functools.partial(losses.pnp_penalties.ib, b=3.0),
}


# Every loss as tested here, with high temperatures, so that all terms matter.
LOSSES = {
    "fast_ap": functools.partial(losses.fast_ap, num_bins=8),
    "smooth_ap": functools.partial(losses.smooth_ap, temperature=0.2),
    "recall_at_k": functools.partial(
        losses.recall_at_k, ks=(1, 3, 4), rank_temperature=0.5, k_temperature=0.2
    ),
    **{
        f"pnp:{name}": functools.partial(losses.pnp, temperature=0.2, penalty_fn=penalty_fn)
        for name, penalty_fn in PNP.items()
    },
    "histogram": functools.partial(losses.histogram, num_bins=20),
}


each_loss = pytest.mark.parametrize("name", LOSSES)


each_kind = pytest.mark.parametrize(
    "name", [name for name in LOSSES if "pnp" not in name or name == "pnp:iu"]
)


def unit(x):
    x = np.asarray(x, np.float64)
    norms = np.linalg.norm(x, axis=1, keepdims=True)
    return x / np.where(norms > 0, norms, 1)


def _pnp_penalty(name, r, b=3.0, alpha=1.5):
    return {
        "o": r,
        "ds": np.log(1 + r),
        "dq": 1 - 1 / (1 + r) ** alpha,
        "iu": (1 + r) * np.log(1 + r),
        "ib": (b * r - np.log(1 + b * r)) / b**2,
    }[name]


def _naive_entry(name, s, a, positives, negatives, own_squares=None):
    """One anchor's entry, from its row `s` of cosines."""
    if name == "fast_ap":
        squares, entry, so_far, so_far_positive = 2 - 2 * s, 0.0, 0.0, 0.0
        if own_squares is not None:  # a zero row has no direction: its cosines do not give these
            squares = own_squares[a]
        for center in np.linspace(0, 4, 9):
            positive_weights = [max(0, 1 - abs(squares[j] - center) / 0.5) for j in positives]
            negative_weights = [max(0, 1 - abs(squares[j] - center) / 0.5) for j in negatives]
            so_far += sum(positive_weights) + sum(negative_weights)
            so_far_positive += sum(positive_weights)
            if so_far > 0:
                entry += sum(positive_weights) * so_far_positive / so_far / len(positives)
        return 1 - entry
    if name == "recall_at_k":
        ranked, recalls = positives + negatives, []
        for k in (1, 3, 4):
            within_k = 0.0
            for p in positives:
                rank = 1 + sum(expit((s[z] - s[p]) / 0.2) for z in ranked if z != p)
                within_k += expit((k - rank) / 0.5)
            recalls.append(min(k, within_k) / min(k, len(positives)))
        return 1 - np.mean(recalls)
    positives = positives if own_squares is None else [*positives, a]
    total = 0.0
    for p in positives:
        ahead = {j: expit((s[j] - s[p]) / 0.2) for j in positives + negatives if j != p}
        if name == "smooth_ap":
            total += (1 + sum(ahead[j] for j in positives if j != p)) / (1 + sum(ahead.values()))
        else:
            total += _pnp_penalty(name[4:], sum(ahead[j] for j in negatives))
    return 1 - total / len(positives) if name == "smooth_ap" else total / len(positives)


def _naive_histogram(s, alike, unlike, within_batch):
    anchors_with_pairs = [a for a in range(len(s)) if alike[a].any() and unlike[a].any()]

    def density(mask):
        chosen = {(a, j) for a in anchors_with_pairs for j in range(s.shape[1]) if mask[a, j]}
        chosen = {tuple(sorted(pair)) for pair in chosen} if within_batch else chosen
        nodes = np.linspace(-1, 1, 21)
        return [
            np.mean([max(0, 1 - abs(s[pair] - node) / 0.1) for pair in chosen]) for node in nodes
        ]

    return float(np.dot(density(unlike), np.cumsum(density(alike)))) if anchors_with_pairs else 0.0


def naive(name, x, labels, y=None, reference_labels=None):
    within_batch = y is None
    x = unit(x)
    y, reference_labels = (x, labels) if within_batch else (unit(y), reference_labels)
    s = x @ y.T
    squares = ((x[:, None] - y[None]) ** 2).sum(-1)
    alike = np.asarray(labels)[:, None] == np.asarray(reference_labels)[None]
    unlike = ~alike
    if within_batch:
        alike = alike & ~np.eye(len(x), dtype=bool)
    if name == "histogram":
        return _naive_histogram(s, alike, unlike, within_batch)
    entries = [
        _naive_entry(
            name,
            1 - squares[a] / 2 if name == "fast_ap" else s[a],
            a,
            list(np.flatnonzero(alike[a])),
            list(np.flatnonzero(unlike[a])),
            squares if within_batch else None,
        )
        for a in range(len(x))
        if alike[a].any()
    ]
    return float(np.mean(entries)) if entries else 0.0


ROWS, COLUMNS = 9, 4


@functools.cache
def compiled(name):
    return jax.jit(jax.value_and_grad(LOSSES[name]))


def run_padded(name, x, labels, where=None, in_float64=False):
    """Value and gradient of a batch that is padded to one shape, so that a loss compiles once.

    The padding are columns of zeros and rows that do not count.
    """
    b, d = x.shape
    dtype = np.float64 if in_float64 else x.dtype
    full = np.full((ROWS, COLUMNS), np.nan, dtype)
    full[:b] = 0
    full[:b, :d] = x
    counts = np.arange(ROWS) < b
    counts[:b] &= True if where is None else where
    labels = np.concatenate([labels, np.zeros(ROWS - b)]).astype(np.int32)
    with jax.enable_x64(in_float64):
        value, gradient = compiled(name)(full, labels, where=counts)
    gradient = np.asarray(gradient)
    assert not gradient[~counts].any()
    return value, gradient[:b, :d]
