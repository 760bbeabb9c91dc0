"""Where losses and miners differ from pytorch-metric-learning: rows of docs/coming-from-pml.md."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dmljax import losses, metrics, miners, ops

RNG = np.random.default_rng(0)
EMBEDDINGS, LABELS = RNG.normal(size=(12, 5)), np.repeat(np.arange(3), 4)
CLASS_WEIGHTS = np.array([1.0, 2.0, 4.0])
UNIT = EMBEDDINGS / np.linalg.norm(EMBEDDINGS, axis=1, keepdims=True)


@pytest.fixture
def peer():
    """`value(loss, x=...)` of the peer, in float64, and the peer itself."""
    pml = pytest.importorskip("pytorch_metric_learning", reason="pip install -e '.[bench]'")
    import torch
    from pytorch_metric_learning import distances, losses, miners, reducers  # noqa: F401

    labels = torch.tensor(LABELS)
    pml.value = lambda loss, x=EMBEDDINGS, *mined: float(loss(torch.tensor(x), labels, *mined))
    pml.mine = lambda miner, x=EMBEDDINGS: miner(torch.tensor(x), labels)
    with jax.enable_x64(True):
        yield pml


def close(value, other):
    return np.isclose(value, other, rtol=1e-6, atol=0)


def test_l1_distance_also_normalizes_by_the_l1_norm(peer):
    loss = peer.losses.TripletMarginLoss(distance=peer.distances.LpDistance(p=1))
    l1 = functools.partial(ops.euclidean, p=1)
    scaled = EMBEDDINGS / abs(EMBEDDINGS).sum(1, keepdims=True)
    assert close(losses.triplet(scaled, LABELS, distance_fn=l1), peer.value(loss))
    by_l2 = losses.triplet(EMBEDDINGS, LABELS, distance_fn=ops.unit(l1))
    assert not close(by_l2, peer.value(loss))


def test_margin_counts_pull_and_push_apart(peer):
    margin, reducers = peer.losses.MarginLoss, peer.reducers
    mean = losses.margin(EMBEDDINGS, LABELS, reduce_fn=ops.mean)
    assert close(2 * mean, peer.value(margin(reducer=reducers.MeanReducer())))
    total = losses.margin(EMBEDDINGS, LABELS, reduce_fn=ops.sum)
    assert close(total, peer.value(margin(reducer=reducers.SumReducer())))


@pytest.mark.parametrize(
    ("name", "peer_name"),
    [
        ("multi_similarity", "MultiSimilarityLoss"),
        ("circle", "CircleLoss"),
        ("lifted_structure", "LiftedStructureLoss"),
        ("generalized_lifted_structure", "GeneralizedLiftedStructureLoss"),
        ("tuplet_margin", "TupletMarginLoss"),
        ("angular", "AngularLoss"),
    ],
)
def test_the_peer_multiplies_every_anchor_by_all_weights(peer, name, peer_name):
    import torch

    weighted = peer.reducers.ClassWeightedReducer(torch.tensor(CLASS_WEIGHTS))
    loss = getattr(peer.losses, peer_name)(reducer=weighted)
    anchor_weights = CLASS_WEIGHTS[LABELS]
    ours = getattr(losses, name)
    value = ours(UNIT, LABELS, reduce_fn=ops.weighted(anchor_weights))
    outer = anchor_weights.mean() * ours(UNIT, LABELS, reduce_fn=ops.mean)
    assert close(outer, peer.value(loss, UNIT))
    assert not close(value, peer.value(loss, UNIT))


# The peer's `HistogramLoss` indexes as torch will not allow.
@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence:UserWarning")
@pytest.mark.parametrize(
    ("name", "peer_name"),
    [
        ("histogram", "HistogramLoss"),
        ("pnp", "PNPLoss"),
        ("threshold_consistent_margin", "ThresholdConsistentMarginLoss"),
    ],
)
def test_the_peer_reduces_some_losses_before_the_reducer(peer, name, peer_name):
    loss = getattr(peer.losses, peer_name)
    mean, total = peer.value(loss()), peer.value(loss(reducer=peer.reducers.SumReducer()))
    assert mean == total
    ours = getattr(losses, name)
    assert close(ours(EMBEDDINGS, LABELS), mean)
    assert ours(EMBEDDINGS, LABELS, reduce_fn=ops.sum) > 10 * mean


def test_n_pairs_of_the_peer_depends_on_the_order_of_the_mined_pairs(peer):
    anchors, positives, *negatives = peer.mine(peer.miners.MultiSimilarityMiner())
    loss = peer.losses.NPairsLoss()
    ours = losses.n_pairs(EMBEDDINGS, LABELS, mine_fn=miners.multi_similarity)
    order = np.lexsort((positives, anchors))
    in_batch_order = (anchors[order], positives[order], *negatives)
    assert close(ours, peer.value(loss, EMBEDDINGS, in_batch_order))
    reverse = order[::-1].copy()
    reversed_pairs = (anchors[reverse], positives[reverse], *negatives)
    assert not close(ours, peer.value(loss, EMBEDDINGS, reversed_pairs))


def test_the_angular_miner_of_the_peer_reads_embeddings_as_they_are(peer):
    loss, miner = peer.losses.TripletMarginLoss(), peer.miners.AngularMiner(angle=30)
    ours = losses.triplet(EMBEDDINGS, LABELS, mine_fn=functools.partial(miners.angular, angle=30))
    assert close(ours, peer.value(loss, UNIT, peer.mine(miner, UNIT)))
    assert not close(ours, peer.value(loss, EMBEDDINGS, peer.mine(miner)))


def test_the_peer_ignores_the_range_of_the_strategy_all(peer):
    ranges = {"allowed_pos_range": (0.0, 1.0), "allowed_neg_range": (0.5, 1.2)}
    distance = peer.distances.LpDistance()
    miner = peer.miners.BatchEasyHardMiner("all", "all", distance=distance, **ranges)
    mined = peer.mine(miner)
    x = jnp.asarray(EMBEDDINGS)
    pairs, every = ops.pairs(LABELS), miners.selections.every
    distances = ops.unit_euclidean(x, x)
    ours = miners.batch_easy_hard(distances, pairs, pos_fn=every, neg_fn=every, **ranges)
    assert len(mined[0]) == pairs.positives.sum() > ours.positives.sum() > 0
    assert len(mined[2]) == pairs.negatives.sum() > ours.negatives.sum() > 0


def test_of_equal_items_the_wrong_one_comes_first():
    """The peer gives 1 or 0, by the order of the items."""
    query, items = np.zeros((1, 2)), np.array([[1.0, 0.0], [1.0, 0.0]])
    for labels in ([0, 1], [1, 0]):
        scores = metrics.retrieval(
            query, np.array([0]), gallery=items, gallery_labels=np.array(labels), ks=(1,)
        )
        assert scores["P@1"] == 0
