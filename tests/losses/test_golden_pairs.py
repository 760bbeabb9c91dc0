"""Pair losses equal pytorch-metric-learning 2.9.0 in float64, except for its known faults."""

import functools
import pathlib

import jax
import numpy as np
import pytest
from system import load_module

from dmljax import losses

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
golden = load_module(GOLDEN / "cases.py")
STORED = dict(np.load(GOLDEN / "pairs.npz"))

# Cases whose options are not the defaults.
OPTIONS = {
    "contrastive margins": {"pos_margin": 0.3, "neg_margin": 1.2},
    "triplet wide": {"margin": 0.7},
    "ranked_list": {"margin": 0.4, "negative_temperature": 3.0},
}
# Where the peer is wrong. `test_pairs.py` tests the right value of each.
DEVIATIONS = {
    ("tuplet_margin", "duplicates"): "NaN gradient of a positive parallel to its anchor",
    ("nca", "all distinct"): "NaN without positives",
    ("nca", "b2 distinct"): "NaN without positives",
    ("ranked_list", "duplicates"): "a negative at distance 0 has no weight",
    ("swap_triplet", "references"): "d_pn is looked up in the anchors' distances",
    ("lifted_structure", "references"): "negatives of reference p are those of anchor p",
    ("threshold_consistent_margin", "references"): "positives are looked up among anchors",
}
RUNS = sorted({tuple(key.rsplit("/", 1)[0].split("/")) for key in STORED})


B = 12  # rows of a program; smaller batches have rows that do not count


@functools.cache
def compiled(name, with_references):
    loss_fn = functools.partial(getattr(losses, name.split()[0]), **OPTIONS.get(name, {}))
    if not with_references:
        return jax.jit(jax.value_and_grad(lambda x, y, where: loss_fn(x, y, where=where)))

    def loss(xs, labels, others):
        return loss_fn(xs[0], labels, references=xs[1], reference_labels=others)

    return jax.jit(jax.value_and_grad(loss))


def value_and_gradients(name, case):
    with jax.enable_x64(True):
        if case == "references":
            embeddings, labels = golden.of_pairs()["balanced"]
            references, others = golden.references()
            value, (dx, dy) = compiled(name, True)((embeddings, references), labels, others)
            return float(value), np.asarray(dx), np.asarray(dy)
        x, labels = golden.of_pairs()[case]
        b = len(labels)
        rows = np.pad(x, ((0, B - b), (0, 0))), np.pad(labels, (0, B - b)), np.arange(B) < b
        value, dx = compiled(name, False)(*rows)
        return float(value), np.asarray(dx)[:b], None


def relative(actual, expected):
    return np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), 1e-9)


@pytest.mark.parametrize(("name", "case"), [r for r in RUNS if r not in DEVIATIONS])
def test_values_and_gradients_are_those_of_the_peer(name, case):
    value, dx, dy = value_and_gradients(name, case)
    expected = {k: STORED.get(f"{name}/{case}/{k}") for k in ("value", "dx", "dy")}
    assert abs(value - expected["value"]) <= 1e-6 * max(1, abs(expected["value"]))
    assert relative(dx, expected["dx"]) <= 1e-5
    if dy is not None:
        assert relative(dy, expected["dy"]) <= 1e-5


@pytest.mark.parametrize(("name", "case"), DEVIATIONS)
def test_a_corrected_fault_of_the_peer_gives_another_number(name, case):
    """Fails if the peer has fixed a fault or dmljax has lost the correction."""
    value, dx, _ = value_and_gradients(name, case)
    assert np.isfinite(value) and np.isfinite(dx).all()
    expected = STORED[f"{name}/{case}/value"], STORED[f"{name}/{case}/dx"]
    assert not (abs(value - expected[0]) <= 1e-6 and relative(dx, expected[1]) <= 1e-5)
