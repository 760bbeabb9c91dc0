"""A loss under the protocol of "A Metric Learning Reality Check" (Musgrave et al., ECCV 2020).

    dmljax study run studies/reality_check.py:loss=triplet,dataset=cub200 \\
        --config.dataset.root=cub200 --config.net.weights=bn_inception.safetensors

* Four folds of contiguous training classes; a trial trains all four, and its value is the mean of
  the best MAP@R of the held-out classes. 50 trials in the ranges of the published search.
* The best trial is trained again ten times. `separated`: the mean test score of the four nets of
  128 dimensions. `concatenated`: their unit vectors side by side, 512 dimensions, scored once.
* The published search was by a Gaussian process. Here the points are random, by a seed.
* SOP is divided at half of all its classes, as in the paper, and not as its authors divide it.
"""

from __future__ import annotations

from dmljax.studies import points

_UNIT, _RATE = ("uniform", 0.0, 1.0), ("log", 1e-6, 1.0)
_PROXIES = {"method.name": "proxies"}


def _rate_of_proxies(rate: float = 1.0) -> dict:
    """Gives the parameters of the loss their own rate, as a factor on the net's 1e-6."""
    return {"optimizer.groups": [{"path": "^proxies", "factor": rate / 1e-6}]}


# Loss: fields of its row, and the ranges that were searched, as the axes of the published plots
# show them. Rates and temperatures are logarithmic there, scales are not.
LOSSES = {
    "contrastive": (
        {"loss": {"name": "contrastive"}},
        {"loss.pos_margin": ("uniform", -0.2, 2.0), "loss.neg_margin": ("uniform", -0.2, 2.0)},
    ),
    "triplet": ({"loss": {"name": "triplet"}}, {"loss.margin": ("uniform", -0.2, 2.0)}),
    "ntxent": ({"loss": {"name": "ntxent"}}, {"loss.temperature": ("log", 1e-4, 100.0)}),
    "margin": (
        {"loss": {"name": "margin"}},
        {"loss.margin": ("uniform", -0.2, 2.0), "loss.beta": ("uniform", -0.2, 2.0)},
    ),
    "fast_ap": ({"loss": {"name": "fast_ap"}}, {"loss.num_bins": ("int", 2, 250)}),
    "snr_contrastive": (
        {"loss": {"name": "snr_contrastive"}},
        {"loss.pos_margin": ("uniform", 0.0, 2.0), "loss.neg_margin": ("uniform", 0.0, 2.0)},
    ),
    "multi_similarity": (
        {"loss": {"name": "multi_similarity"}},
        {
            "loss.alpha": ("uniform", 0.01, 100.0),
            "loss.beta": ("uniform", 0.01, 100.0),
            "loss.base": _UNIT,
        },
    ),
    "multi_similarity_miner": (
        {"loss": {"name": "multi_similarity"}, "miner": {"name": "multi_similarity"}},
        {
            "loss.alpha": ("uniform", 0.01, 100.0),
            "loss.beta": ("uniform", 0.01, 100.0),
            "loss.base": _UNIT,
            "miner.epsilon": _UNIT,
        },
    ),
    "proxy_nca": (
        {"loss": {"name": "proxy_nca"}, **_PROXIES},
        {"loss.scale": ("uniform", 0.01, 100.0)},
    ),
    "normalized_softmax": (
        {"loss": {"name": "normalized_softmax"}, **_PROXIES},
        {"loss.temperature": ("log", 0.01, 100.0)},
    ),
    "cosface": (
        {"loss": {"name": "cosface"}, **_PROXIES},
        {"loss.margin": _UNIT, "loss.scale": ("uniform", 0.01, 200.0)},
    ),
    "arcface": (
        {"loss": {"name": "arcface"}, **_PROXIES},
        {"loss.margin": ("uniform", 0.0, 90.0), "loss.scale": ("uniform", 0.01, 200.0)},
    ),
    "soft_triple": (
        {"loss": {"name": "soft_triple"}, **_PROXIES, "method.centers": 10},
        {
            "loss.scale": ("uniform", 0.01, 100.0),
            "loss.gamma": ("uniform", 1e-4, 100.0),
            "loss.margin": _UNIT,
            "method.sparsity": _UNIT,
        },
    ),
}
# Ranges that differ on one data set.
ON_SET = {
    ("ntxent", "cars196"): {"loss.temperature": ("log", 1e-5, 100.0)},
    ("ntxent", "sop"): {"loss.temperature": ("log", 1e-5, 100.0)},
    ("multi_similarity", "cub200"): {"loss.alpha": ("uniform", 0.001, 100.0)},
    ("multi_similarity_miner", "cub200"): {"loss.alpha": ("uniform", 0.001, 100.0)},
    ("multi_similarity_miner", "sop"): {"loss.beta": ("uniform", 0.01, 200.0)},
    ("arcface", "sop"): {"loss.scale": ("uniform", 0.01, 300.0)},
    ("soft_triple", "sop"): {
        "loss.scale": ("uniform", 0.01, 200.0),
        "loss.gamma": ("uniform", 0.01, 100.0),
    },
}
# An "epoch" is 100 steps: epochs between evaluations, and the patience in evaluations.
EVALUATED = {"cub200": (2, 4), "cars196": (5, 2), "sop": (20, 1)}


def get_study(
    loss: str = "contrastive",
    dataset: str = "cub200",
    trials: int = 50,
    repetitions: int = 10,
    steps: int = 100_000,
):
    if loss not in LOSSES:
        raise ValueError(f"loss is one of {', '.join(LOSSES)}, not {loss!r}")
    if dataset not in EVALUATED:
        raise ValueError(f"dataset is one of {', '.join(EVALUATED)}, not {dataset!r}")
    every, patience = EVALUATED[dataset]
    fields, space = LOSSES[loss]
    space = dict(space)
    has_proxies = "method.name" in fields
    if has_proxies:
        fields = {**fields, **_rate_of_proxies()}
        space["optimizer.groups.0.factor"] = ("log", 1.0, 1e6)
    space |= ON_SET.get((loss, dataset), {})
    candidates = points.random(space, trials, seeds=[1000])
    # 8 classes with 4 images each; for losses against proxies 32 with one.
    images = 1 if has_proxies else 4
    return {
        "title": f"Reality check: {loss}, {dataset}",
        "base": "multi_similarity",
        "argument": f"dataset={dataset}",
        "all": {
            "miner": None,
            "transform": {
                "name": "standard_train",
                "size": 227,
                "shorter": 256,
                "area": [0.16, 1.0],
            },
            "method": {"name": "pairs", "dim": 128},
            "sampler": {"name": "class_balanced", "classes": 32 // images, "per_class": images},
            "optimizer": {"name": "rmsprop", "rate": 1e-6, "momentum": 0.9, "l2": 1e-4},
            "schedule": "constant",
            "steps": steps,
            "evaluate.every": min(100 * every, steps),
            "evaluate.clustering": None,
            "patience": patience,
            "pictures": None,
            **({"dataset.half": True} if dataset == "sop" else {}),
            **fields,
        },
        "folds": 4,
        "seeds": repetitions,
        "select": "val/MAP@R",
        "rows": {
            **candidates,
            f"{loss}, separated": {"best_of": list(candidates), "by": "val/MAP@R"},
            f"{loss}, concatenated": {"runs_of": f"{loss}, separated", "join": "folds"},
        },
        "scores": ("P@1", "RP", "MAP@R"),
    }
