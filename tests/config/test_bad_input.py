"""Bad input gets one clear line with the value and the fix."""

import functools

import numpy as np
import pytest

from dmljax import losses, metrics, miners, ops, retrieval

x, y, labels = np.zeros((4, 3), np.float32), np.ones((5, 3), np.float32), np.array([0, 0, 1, 1])
proxies, bad = np.ones((3, 3), np.float32), np.full((4, 3), np.nan, np.float32)
triplet = functools.partial(losses.triplet, x, labels)
CASES = {
    "rank": (lambda: losses.triplet(x[0], labels), "embeddings", "(3,)"),
    "integers": (lambda: losses.supcon(x.astype(int), labels), "floats", "astype"),
    "lengths": (lambda: losses.contrastive(x, labels[:3]), "int [4]", "[3]"),
    "widths": (
        lambda: triplet(references=y[:, :2], reference_labels=np.arange(5)),
        "(4, 3)",
        "(5, 2)",
    ),
    "no reference labels": (
        lambda: triplet(references=y),
        "reference_labels",
    ),
    "no references": (
        lambda: triplet(reference_labels=labels),
        "references",
    ),
    "where": (lambda: triplet(where=np.ones(3, bool)), "where", "bool [4]"),
    "pairs": (lambda: losses.nca(x, ops.pairs(labels[:2])), "Pairs.positives", "[4 4]", "[2, 2]"),
    "empty": (lambda: losses.circle(x[:0], labels[:0]), "(0, 3)"),
    "imbalance": (
        lambda: losses.ranked_list(x, labels, margin=1.0, negative_temperature=1.0, imbalance=2),
        "imbalance",
        "2",
    ),
    "beta": (lambda: losses.margin(x, ops.pairs(labels), beta=np.ones(3)), "beta", "labels"),
    "label out of range": (lambda: losses.arcface(x, labels + 2, proxies), "3"),
    "proxy width": (lambda: losses.cosface(x, labels, proxies[:, :2]), "(3, 2)"),
    "sub-centers": (lambda: losses.subcenter_arcface(x, labels, proxies), "[c k d]"),
    "angular references": (
        lambda: triplet(mine_fn=miners.angular, references=y, reference_labels=np.arange(5)),
        "[4",
        "5]",
    ),
    "name of a miner": (lambda: triplet(mine_fn="semihard"), "mine_fn", "'semihard'", "miners."),
    "name of a reduction": (lambda: triplet(reduce_fn="mean"), "reduce_fn", "'mean'", "ops.mean"),
    "name of a selection": (
        lambda: miners.batch_easy_hard(np.ones((4, 4)), ops.pairs(labels), pos_fn="hard"),
        "pos_fn",
        "'hard'",
        "miners.selections.hardest",
    ),
    "labels of a miner": (
        lambda: miners.multi_similarity(x, labels),
        "ops.pairs(labels)",
        "ndarray",
    ),
    "weighted sum of a loss": (
        lambda: losses.weighted_sum(losses.triplet),
        "{name: (weight, loss_fn), ...}",
        "triplet",
    ),
    "memory of proxies": (
        lambda: losses.cross_batch_memory(losses.arcface, size=8),
        "arcface",
        "losses.contrastive",
    ),
    "weights of anchors": (
        lambda: losses.proxy_anchor(x, labels, proxies, reduce_fn=ops.weighted(np.ones(4))),
        "4 weights",
        "needs 3",
        "class",
    ),
    "text labels": (lambda: losses.triplet(x, np.array(["a", "b"] * 2)), "<U1", "return_inverse"),
    "nothing to find": (lambda: metrics.retrieval(x[:0], labels[:0]), "from 1 to 0 items to find"),
    "empty gallery": (
        lambda: metrics.retrieval(x, labels, gallery=x[:0], gallery_labels=labels[:0], ks=(1,)),
        "from 1 to 0 items to find",
    ),
    "shares": (lambda: metrics.effective_rank(x), "[4, 3]", "metrics.spectrum"),
    "negative shares": (lambda: metrics.participation(np.array([1.5, -0.5])), "from 0"),
    "ranks": (lambda: metrics.precision_at_1(x), "float32 [4, 3]", "metrics.retrieval"),
    "ranks of all positives": (lambda: metrics.map_at_r(x), "float32 [4, 3]", "retrieval.ranks"),
    "histograms": (lambda: metrics.uniformity(x), "ndarray", "similarity_histograms"),
    "views": (lambda: losses.clip(x, y), "4", "5"),
    "memory": (
        lambda: (m := losses.cross_batch_memory(losses.ntxent, size=2)).loss(m.init(3), x, labels),
        "2",
        "4",
    ),
    "k": (lambda: retrieval.nearest(x, y, k=6), "6", "5"),
    "ks": (lambda: metrics.retrieval(x, labels, ks=(1, 9)), "9", "3"),
    "nan": (lambda: metrics.retrieval(bad, labels, ks=(1,)), "NaN"),
    "evaluation rank": (lambda: metrics.retrieval(x[0], labels, ks=(1,)), "(3,)"),
    "clusters": (lambda: retrieval.kmeans(x, k=9, seed=0), "9", "4"),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_refused_in_one_line_with_its_value(name, unchecked):
    call, *parts = CASES[name]
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and len(message) < 800
    for part in parts:
        assert part in message
