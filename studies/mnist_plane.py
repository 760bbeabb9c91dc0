"""MNIST in a plane: contrastive against triplet loss on three sets of digits, after a blog post.

    dmljax study run studies/mnist_plane.py --config.dataset.root=mnist

The post shows one run of each, at the last step, without a number. Its verdict: triplets are not
better, on 1, 5 and 9 "quite a bit worse", and fewer digits separate better. A run that collapses is
counted ("1 of 5 collapsed") and stays in the mean.
"""

from __future__ import annotations


def get_study(seeds: int = 5):
    rows = {}
    for labels in ("159", "125689", ""):
        words = f",labels={labels}" * bool(labels)
        contrastive, triplet = (f"{loss}, {labels or 'all'}" for loss in ("contrastive", "triplet"))
        # Fewer digits against all; triplets against pairs of the same digits.
        rows[contrastive] = {"argument": f"loss=contrastive{words}"}
        rows[triplet] = {"argument": f"loss=triplet{words}", "baseline": contrastive}
    return {
        "title": "MNIST in a plane",
        "base": "mnist",
        "all": {"pictures": None},
        "rows": rows,
        "seeds": seeds,
        "baseline": "contrastive, all",
        "test": "paired",
        "scores": ("knn", "R@1", "MAP@R"),
        # Chance is a third on three digits, a sixth on six and a tenth on ten.
        "collapsed": {"R@1": 0.4},
    }
