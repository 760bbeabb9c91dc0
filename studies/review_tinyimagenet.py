"""TinyImageNet: triplets with mined pairs against ArcFace, after a published review.

    dmljax study run studies/review_tinyimagenet.py --config.dataset.root=tinyimagenet \\
        --config.net.weights=resnet50.safetensors

The review (pento.ai, 2022) has plots without numbers. Its orders: triplets lead in AMI and NMI,
ArcFace in P@1, RP, MAP, MAP@R and MRR. It cut the rankings of MAP and MRR at the largest class, and
so do the columns here. Last epoch, three seeds.

The pictures of the review show both embeddings of one seed side by side: run both rows with
`--config.pictures=page` (`--dry-run` prints their folders), then `dmljax report TRIPLET ARCFACE`.
"""

from __future__ import annotations


def get_study(seeds: int = 3):
    return {
        "title": "Triplets against ArcFace, TinyImageNet",
        "base": "tinyimagenet",
        "all": {"pictures": None},
        "rows": {"triplet": {}, "ArcFace": {"argument": "loss=arcface"}},
        "seeds": seeds,
        "baseline": "triplet",
        "test": "welch" if seeds < 5 else "paired",
        "scores": ("AMI", "NMI", "P@1", "RP", "mAP@max_bin_count", "MAP@R", "MRR@max_bin_count"),
    }
