"""Published backbones on a data set: as they are, and with a linear head on their features.

    dmljax study run studies/backbones.py:dataset=cub200
    dmljax study run studies/backbones.py:dataset=folder --config.dataset.root=photos/

`dataset` is cub200, cars196, sop, inshop or folder. The rows are the backbones whose weights are on
this machine (`dmljax weights list` shows all), or with `nets=dinov2_s14+clip_b16` these two. No
backbone is trained: the features of all images are computed once, and the runs train the head of
`configs/folder.py` on them. Columns `frozen/...` are the scores without any training; they are the
same for all seeds. The steps are fixed: no step is chosen by test scores.

The published R@1 of backbones without training are from the zoo of open-metric-learning, at 224
pixels (336 for L/14@336). The zoo may preprocess images in another way than the runs here, which
print their preprocessing. For this reason, two published values of one backbone differ by up to 16
points. DINOv3 and SigLIP 2 have no published values here.
"""

from __future__ import annotations

from dmljax import at_hand

_DATASETS = ("cub200", "cars196", "sop", "inshop")
_PUBLISHED = {  # R@1 without training, on these data sets
    "resnet50": (45.5, 24.7, 51.5, 28.4),
    "dino_vits16": (62.7, 26.5, 64.8, 50.9),
    "dino_vitb16": (54.1, 28.8, 65.8, 51.4),
    "dinov2_s14": (79.7, 50.3, 56.6, 33.4),
    "dinov2_b14": (84.2, 64.4, 56.5, 34.2),
    "dinov2_l14": (84.4, 69.2, 57.6, 35.2),
    "dinov2_s14_reg": (79.5, 74.0, 56.6, 33.2),
    "dinov2_b14_reg": (83.3, 82.8, 55.7, 32.4),
    "dinov2_l14_reg": (84.0, 87.1, 57.1, 34.0),
    "clip_b32": (56.0, 69.3, 61.2, 49.1),
    "clip_b16": (66.5, 76.7, 64.8, 60.6),
    "clip_l14": (74.5, 84.4, 67.0, 67.5),
    "unicom_b32": (79.6, 89.3, 69.0, 72.2),
    "unicom_b16": (84.7, 91.6, 70.0, 73.4),
    "unicom_l14": (86.8, 92.2, 72.6, 79.0),
    "unicom_l14_336": (87.5, 92.4, 74.5, 81.0),
}


def get_study(dataset: str = "cub200", nets: str = "", seeds: int = 3):
    if dataset not in (*_DATASETS, "folder"):
        raise ValueError(f"dataset is one of {', '.join(_DATASETS)} and folder, not {dataset!r}")
    names = nets.split("+") if nets else list(at_hand.weights_at_hand())
    if not names:
        raise ValueError(f"no weights of a backbone are on this machine: {at_hand.GET_BACKBONE}")
    study = {
        "title": f"Backbones without training and with a linear head: {dataset}",
        "base": "folder",
        "rows": {name: {"argument": f"net={name}"} for name in names},
        "all": {"pictures": None, "evaluate.clustering": None},
        "seeds": seeds,
        "scores": ("R@1", "MAP@R", "frozen/R@1", "frozen/MAP@R"),
    }
    if len(names) > 1:
        study |= {"baseline": names[0], "test": "paired"}
    if dataset != "folder":
        study["all"]["dataset"] = {"name": dataset}
        # As in published runs: the folder's default reads large photographs at a fraction.
        study["all"] |= {f"{name}.scaled_decode": False for name in ("transform", "eval_transform")}
        column = _DATASETS.index(dataset)
        published = {n: {"frozen/R@1": v[column]} for n, v in _PUBLISHED.items() if n in names}
        if published:
            study |= {"published": published, "published_from": "open-metric-learning, its zoo"}
    return study
