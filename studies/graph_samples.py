"""Sample efficiency: fewer training images of each class, or fewer training classes.

    dmljax study run studies/graph_samples.py:dataset=cars196 --config.dataset.root=cars196 \\
        --config.net.weights=resnet50.safetensors

The graph attention study proposes it; nobody has published it. The seed of a run also draws its
images and classes. All rows have equally many steps: the 70 epochs of the recipe's sampler on all
training images (`dataset.full_epochs`).
"""

from __future__ import annotations

SHARES = {"1/2": 0.5, "1/4": 0.25, "1/8": 0.125}


def get_study(dataset: str = "cub200", attention: str = "dot", seeds: int = 5):
    rows = {"all": {}}
    for what, field in (("images", "image_fraction"), ("classes", "class_fraction")):
        for name, share in SHARES.items():
            rows[f"{name} of the {what}"] = {
                f"dataset.{field}": share,
                "dataset.full_epochs": True,
            }
    return {
        "title": f"Sample efficiency, {attention} attention, {dataset}",
        "base": "graph",
        "argument": f"dataset={dataset},attention={attention},backbone_only=False",
        "all": {
            "pictures": None,
            "select": "last",
            "reload_best_at": [],
            "evaluate.every": None,  # after the last step
        },
        "rows": rows,
        "seeds": seeds,
        "baseline": "all",
        "test": "paired",
        "scores": ("R@1", "MAP@R") + (("NMI",) if dataset in ("cub200", "cars196") else ()),
    }
