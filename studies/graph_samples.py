"""Sample efficiency: fewer training images of each class, or fewer training classes.

    dmljax study run studies/graph_samples.py:dataset=cars196 --config.dataset.root=cars196 \\
        --config.net.weights=resnet50.safetensors

The graph attention study proposes it; nobody has published it. The drawn images and classes belong
to the seed. Batches are those of the recipe, so that an epoch of few images has fewer steps: the
length of every row is the number of steps of the full one.
"""

from __future__ import annotations

SHARES = {"1/2": 0.5, "1/4": 0.25, "1/8": 0.125}
# 70 epochs of the recipe's batches on all training images.
STEPS = {"cub200": 7600, "cars196": 8050, "sop": 46000, "inshop": 32000}


def get_study(dataset: str = "cub200", attention: str = "dot", seeds: int = 5):
    steps = STEPS[dataset]
    images = {f"{name} of the images": {"dataset.image_share": s} for name, s in SHARES.items()}
    classes = {f"{name} of the classes": {"dataset.class_share": s} for name, s in SHARES.items()}
    return {
        "title": f"Sample efficiency, {attention} attention, {dataset}",
        "base": "graph",
        "argument": f"dataset={dataset},attention={attention},backbone_only=False",
        "all": {
            "pictures": False,
            "steps": steps,
            "select": "last",
            "reload_best_at": [],
            "schedule.at": [3 * steps // 7, 5 * steps // 7],
            "evaluate.every": steps,
        },
        "rows": {"all": {}, **images, **classes},
        "seeds": seeds,
        "baseline": "all",
        "test": "paired",
        "scores": ("R@1", "MAP@R") + (("NMI",) if dataset in ("cub200", "cars196") else ()),
    }
