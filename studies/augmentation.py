"""What random crops, mirror images and colors do when all layers are fine-tuned on photographs.

    dmljax study run studies/augmentation.py:dataset=folder --config.dataset.root=photos/

`dataset` is cub200, cars196, sop, inshop or folder; `net` is a backbone whose weights are on this
machine, by default the first one. The first row is `folder:train=all` as it is: crops take 40 % of
an image or more, half of them are mirrored, and colors stay. Every other row changes one of the
three, and is compared with the first. The steps are fixed: no step is chosen by test scores.
"""

from __future__ import annotations

from dmljax import at_hand

_DATASETS = ("cub200", "cars196", "sop", "inshop", "folder")


def get_study(dataset: str = "folder", net: str = "", seeds: int = 3):
    if dataset not in _DATASETS:
        raise ValueError(f"dataset is one of {', '.join(_DATASETS)}, not {dataset!r}")
    net = net or next(iter(at_hand.weights_at_hand()), "")
    if not net:
        raise ValueError(f"no weights of a backbone are on this machine: {at_hand.GET_BACKBONE}")
    study = {
        "title": f"Augmentation of photographs, {net}: {dataset}",
        "base": "folder",
        "rows": {
            "crops from 40 %": {},
            "crops from 8 %": {"transform.area": [0.08, 1.0]},
            "crops from 80 %": {"transform.area": [0.8, 1.0]},
            "never mirrored": {"transform.flip": 0.0},
            "colors by 0.2": {"transform.color": 0.2},
            "colors by 0.4": {"transform.color": 0.4},
        },
        "all": {"pictures": None, "evaluate.clustering": None},
        "seeds": seeds,
        "baseline": "crops from 40 %",
        "test": "paired",
        "scores": ("R@1", "MAP@R", "frozen/R@1", "frozen/MAP@R"),
    }
    for row in study["rows"].values():
        row["argument"] = f"net={net},train=all"
    if dataset != "folder":
        study["all"]["dataset"] = {"name": dataset}
    return study
