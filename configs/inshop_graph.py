"""In-Shop Clothes by attention over the batch (Seidenschwarz et al., ICML 2021).

    python -m dmljax.main --config=configs/inshop_graph.py --config.dataset.root=In_shop \\
        --config.net.weights=resnet50.safetensors
    python -m dmljax.main --config=configs/inshop_graph.py:attention=dot_plus_one,published=True ...

Expected, in percent, 512 dimensions: R@1 92.8, R@10 98.5, R@20 99.1, R@40 99.2 (README of the
official code, intra_batch, whose attention is dot_plus_one; the code reports R@30, not R@40).
`attention` (dot, dot_plus_one, gat, gatv2, none), `mlp` and `backbone_only` are the ablations of
`cub_graph.py`, for which there are no published numbers here.

The form is the corrected one.
`published=True` adds what the published code does otherwise and all of these numbers were produced
with: 0.299 for the deviation of red, GAT and GATv2 with one attention vector for all heads and one
projection, batch norms of the net updated twice a step, and a rate that is not divided again at the
second reload. Every row chose its best epoch on the test classes, and so does this config;
`validation=0.2` chooses on a fifth of the training classes instead, which then are not trained on.

The weights are torchvision's V1 (docs/weights.md):

    python -m dmljax.weights.convert --fetch=resnet50
    python -m dmljax.weights.convert resnet50-19c8e357.pth --net=resnet50 --to=resnet50.safetensors
"""

from ml_collections import ConfigDict

from dmljax.train.config import arguments


def get_config(arg: str | None = None) -> ConfigDict:
    given = arguments(
        arg,
        attention="dot",
        mlp=True,
        backbone_only=False,
        published=False,
        validation=0.0,
    )
    attention, published = given["attention"], given["published"]
    if published and attention in ("gat", "gatv2"):
        attention = {"name": attention, "share_vector": True, "share_projection": True}
    red_std = 0.299 if published else 0.229
    rate, decay = 0.00011265974954242144, 1.0554824926510768e-07
    return ConfigDict(
        {
            "seed": 0,
            "dataset": {"name": "inshop", "root": None},
            "transform": {"name": "graph_train", "red_std": red_std},
            "eval_transform": "graph_eval",
            "normalize": {"name": "imagenet", "red_std": red_std},
            "sampler": {"name": "combine", "classes": 14, "per_class": 4},
            # Checkpointed stages run twice there; the stem, which does not, differs from 0.19.
            "net": {
                "name": "resnet50",
                "momentum": 0.19 if published else 0.1,
                "weights": None,
            },
            "method": {
                "name": "graph",
                "dim": 512,
                "layers": 1,
                "heads": 4,
                "concat_layers": False,
                "attention": attention,
                "mlp": "relu" if given["mlp"] else "none",
                "graph_weight": 0.0 if given["backbone_only"] else 1.0,
                # Edges by correlation, which no published number has.
                "weighted": False,
                "threshold": None,
            },
            "loss": {
                "name": "label_smoothed_cross_entropy",
                "epsilon": 0.1,
                "temperature": 0.18591347176280537,
            },
            # Everything decays, biases and norms too.
            "optimizer": {
                "name": "radam",
                "rate": rate,
                "decay": decay,
                "groups": [{"path": ".", "decay": decay}],
            },
            "steps": "70 epochs",
            "schedule": {
                "name": "steps",
                "at": ("30 epochs",) if published else ("30 epochs", "50 epochs"),
                "divide": 10.0,
            },
            "reload_best_at": ("30 epochs", "50 epochs"),
            "validation": given["validation"],
            "select": "val" if given["validation"] else "test",
            "evaluate": {"every": "1 epoch", "ks": (1, 10, 20, 30, 40), "clustering": False},
        }
    )
