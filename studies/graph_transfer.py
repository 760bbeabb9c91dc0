"""Transfer between two data sets: trained on the target, or first on the source.

    dmljax study run studies/graph_transfer.py:source=cars196,target=cub200,source_root=cars196,\\
target_root=cub200 --config.net.weights=resnet50.safetensors

The graph attention study proposes it; nobody has published it. Both transfers start from the
parameters of the source and have a new classifier. `fine-tuned` trains all of them. In `last layer`
the ResNet-50 stays as the source has left it. What learns is the linear layer from 2,048 to 512
dimensions, and the parts that only the loss uses: the graph network and the classifiers. The
evaluated net is the ResNet-50 with that linear layer.

The first rows hold a fifth of the training classes out and choose the epoch on it. The rows "all
classes" train on all training classes, for the same 70 epochs, and take the last epoch: no rule
reads the test classes. The source is scored on its own test classes, and no row is compared with
it.
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
    protocols = {
        "": ("held_out=0.2", {}),
        ", all classes": ("held_out=0.0", {"select": "last", "reload_best_at": []}),
    }
    rows = {}
    for suffix, (held_out, fields) in protocols.items():
        words = f"attention={attention},{held_out},backbone_only=False"
        on_target = {"argument": f"dataset={target},{words}", "dataset.root": target_root, **fields}
        on_source = {"argument": f"dataset={source},{words}", "dataset.root": source_root, **fields}
        alone, start = f"{target} alone{suffix}", f"{source}{suffix}"
        transferred = {**on_target, "start_from": start, "baseline": alone}
        rows |= {
            alone: {**on_target, "baseline": None},
            start: {**on_source, "baseline": None},
            f"fine-tuned{suffix}": transferred,
            f"last layer{suffix}": {**transferred, "trained": "last"},
        }
    return {
        "title": f"Transfer from {source} to {target}, {attention} attention",
        "base": "graph",
        "all": {"pictures": None},
        "rows": rows,
        "seeds": seeds,
        "test": "paired" if seeds >= 5 else "welch",
        "scores": ("R@1", "MAP@R", "NMI"),
    }
