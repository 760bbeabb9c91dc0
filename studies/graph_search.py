"""Random search over the hyper-parameters of attention over the batch, on held-out classes.

    dmljax study run studies/graph_search.py:attention=gatv2 --config.dataset.root=cub200 \\
        --config.net.weights=resnet50.safetensors

The space, the 30 trials and their 40 epochs come from Intra-Batch's code, which scores trials on
the test classes. Here the held-out classes choose, and the best trial is trained again with new
seeds for 70 epochs, and compared with the published setting.
"""

from __future__ import annotations

from dmljax import recipes
from dmljax.studies import points


def get_study(dataset: str = "cub200", attention: str = "dot", seeds: int = 5, trials: int = 30):
    published = recipes.graph(dataset=dataset, held_out=0.2)
    candidates = points.random(
        {
            "optimizer.rate": ("log", 1e-5, 1e-3),
            # The recipe's only group sets the decay.
            "optimizer.groups.0.decay": ("log", 1e-15, 1e-6),
            "sampler.classes": ("int", 6, 15),
            "sampler.per_class": ("int", 3, 9),
            "loss.temperature": ("uniform", 0.01, 1.0),
            "method.heads": ("choice", 1, 2, 4, 8),
        },
        trials,
        steps="40 epochs",
        reload_best_at=[],
        seeds=[1000],
    )
    return {
        "title": f"Search for {attention} attention, {dataset}",
        "base": "graph",
        "argument": f"dataset={dataset},attention={attention},held_out=0.2,backbone_only=False",
        "all": {
            "pictures": None,
            "sampler": {"name": "class_chunks", "classes": 9, "per_class": 6},
        },
        "rows": {
            "published setting": {"sampler": published["sampler"]},
            **candidates,
            "best trial": {
                "best_of": list(candidates),
                "by": "val/R@1",
                **{name: published[name] for name in ("steps", "reload_best_at")},
            },
        },
        "seeds": seeds,
        "baseline": "published setting",
        "test": "welch",
        "scores": ("R@1", "MAP@R", "NMI"),
    }
