"""Transfer between two data sets: trained on the target, or first on the source.

    dmljax study run studies/graph_transfer.py:source=cars196,target=cub200,source_root=cars196,\\
target_root=cub200 --config.net.weights=resnet50.safetensors

The graph attention study proposes it; nobody has published it. Both transfers begin with all that
the source has learned, linear layer included, and with a new classifier. `fine-tuned` trains all of
it; `last layer` freezes the backbone, so that of the evaluated net its linear layer alone learns.
The source is scored on its own test classes, and no row is compared with it.
"""

from __future__ import annotations


def get_study(
    source: str = "cars196",
    target: str = "cub200",
    attention: str = "dot",
    source_root: str = "cars196",
    target_root: str = "cub200",
    seeds: int = 5,
):
    words = f"attention={attention},validation=0.2,backbone_only=False"
    on_target = {"argument": f"dataset={target},{words}", "dataset.root": target_root}
    return {
        "title": f"Transfer from {source} to {target}, {attention} attention",
        "base": "graph",
        "all": {"pictures": False},
        "rows": {
            f"{target} alone": on_target,
            source: {
                "argument": f"dataset={source},{words}",
                "dataset.root": source_root,
                "baseline": None,
            },
            "fine-tuned": {**on_target, "start_from": source},
            "last layer": {**on_target, "start_from": source, "trained": "last"},
        },
        "seeds": seeds,
        "baseline": f"{target} alone",
        "test": "paired" if seeds >= 5 else "welch",
        "scores": ("R@1", "MAP@R", "NMI"),
    }
