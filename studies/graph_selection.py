"""How much the rule that chooses the epoch is worth: test classes against held-out classes.

    dmljax study run studies/graph_selection.py:dataset=cars196 --config.dataset.root=cars196 \\
        --config.net.weights=resnet50.safetensors

All published numbers of the graph attention study train on all training classes, reload the best
parameters after 30 and 50 epochs, and report the best epoch, all by R@1 of the test classes: the
row "as published". Its baseline is the protocol of train, val and test: a fifth of the training
classes is held out and chooses the epoch, and the test classes are scored only.

The other rows separate the parts of that difference. Rows of one group read the same runs by
different rules. "all classes, last epoch" chooses nothing, and shows what the held-out classes are
worth as training data.
"""

from __future__ import annotations


def get_study(dataset: str = "cub200", attention: str = "dot", seeds: int = 5):
    held_out, last = "held out, last epoch", "all classes, last epoch"
    everything = {"argument": "held_out=0.0"}
    # Runs that several rules read may reload nothing by a score.
    return {
        "title": f"Rules that choose the epoch, {attention} attention, {dataset}",
        "base": "graph",
        "argument": f"dataset={dataset},attention={attention},backbone_only=False,held_out=0.2",
        "all": {"pictures": None, "reload_best_at": [], "select": "last"},
        "rows": {
            "held out, by val R@1": {"runs_of": held_out, "choose": "val/R@1"},
            "as published": everything
            | {"reload_best_at": ["30 epochs", "50 epochs"], "select": "test/R@1"},
            held_out: {},
            "held out, by val MAP@R": {"runs_of": held_out, "choose": "val/MAP@R"},
            "held out, by test R@1": {"runs_of": held_out, "choose": "test/R@1"},
            last: everything,
            "all classes, by test R@1": {"runs_of": last, "choose": "test/R@1"},
        },
        "seeds": seeds,
        "baseline": "held out, by val R@1",
        "test": "paired",
        "scores": ("R@1", "MAP@R", "NMI"),
    }
