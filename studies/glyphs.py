"""Six losses on characters in sixteen typefaces, five seeds each; needs no download.

    dmljax study run studies/glyphs.py

30 runs of 450 steps. All rows have one net, 64 dimensions, batches of 128 images, one optimizer and
one schedule. A batch has 32 classes with 4 images for losses of pairs, and 128 classes with one
image for losses against proxies (docs/choosing.md). The losses have the settings of their papers or
of a few trials by hand. So the table compares these settings in short runs, and no more than that.
"""

from __future__ import annotations


def get_study(steps: int = 450, seeds: int = 5):
    return {
        "title": "Six losses on glyphs, short runs",
        "base": "glyphs",
        "all": {
            "steps": steps,
            "evaluate.every": steps,
            "evaluate.clustering.seeds": [0],
            "pictures": None,
        },
        "rows": {
            "multi-similarity": {},
            "contrastive": {"loss": {"name": "contrastive", "neg_margin": 0.5}},
            "triplet": {"loss": {"name": "triplet", "margin": 0.1}},
            "NT-Xent": {"loss": {"name": "ntxent", "temperature": 0.1}},
            "normalized softmax": {"argument": "loss=normalized_softmax"},
            "proxy-anchor": {"argument": "loss=proxy_anchor"},
        },
        "seeds": seeds,
        "baseline": "multi-similarity",
        "test": "paired",
        "scores": ("R@1", "MAP@R", "NMI"),
    }
