"""ABE with a small backbone, and its contrastive loss as a loop in float64."""

import functools

import jax
import numpy as np
from one_step import Patches, fill

from dmljax.config import registry
from dmljax.methods.abe import contrastive

CLASSES, B = 6, 24
CUT = {"split": ("one", "two"), "attention": "two"}
HEADS = {"attention": None}  # the control: separate heads without attention
NET = Patches()


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def naive_contrastive(x, labels, *, margin=1.0, push_positives=False, partner=None):
    x, terms = x.astype(np.float64), []
    for i in range(len(x)):
        for j in range(len(x)):
            if i == j or (partner is not None and partner[i] != j):
                continue
            square = np.sum((x[i] - x[j]) ** 2)
            same = labels[i] == labels[j]
            push = max(0, margin - square) if push_positives or not same else 0
            terms.append(square * same + push)
    return np.mean(terms)


@functools.cache
def batch_of_patterns(seed=0):
    rng = np.random.default_rng(seed)
    patterns = np.random.default_rng(99).normal(size=(CLASSES, 12, 12, 3))
    labels = np.repeat(np.arange(CLASSES, dtype=np.int32), B // CLASSES)
    images = patterns[labels] + rng.normal(size=(B, 12, 12, 3))
    order = rng.permutation(B)
    return {"images": images[order].astype(np.float32), "labels": labels[order]}


def abe_method(loss_fn=contrastive, mine_fn=None, **options):
    spec = {"name": "abe", "learners": 3, "dim": 12, **CUT, **options}
    return registry.resolve("method", spec)(NET, loss_fn, classes=CLASSES, mine_fn=mine_fn)


@functools.cache
def initial_state(heads=False):
    method = abe_method(**HEADS if heads else {})
    return fill(jax.eval_shape(method.init, jax.random.key(0), batch_of_patterns()))
