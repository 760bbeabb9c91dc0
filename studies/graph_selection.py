"""How much the rule that chooses the epoch is worth: one training, four rules.

    dmljax study run studies/graph_selection.py:dataset=cars196 --config.dataset.root=cars196 \\
        --config.net.weights=resnet50.safetensors

Every evaluation of a run has all scores, and each row reads the same runs by another rule. The
published numbers of the graph attention study follow the first one, which reads the test classes.
"""

from __future__ import annotations


def get_study(dataset: str = "cub200", attention: str = "dot", seeds: int = 5):
    return {
        "title": f"Rules that choose the epoch, {attention} attention, {dataset}",
        "base": "graph",
        "argument": f"dataset={dataset},attention={attention},backbone_only=False,validation=0.2",
        # Nothing may be reloaded by a score, or the rules would not read the same training.
        "all": {"pictures": False, "reload_best_at": [], "select": "last"},
        "rows": {
            "last epoch": {},
            "by test R@1": {"runs_of": "last epoch", "choose": "test/R@1"},
            "by held-out R@1": {"runs_of": "last epoch", "choose": "val/R@1"},
            "by held-out MAP@R": {"runs_of": "last epoch", "choose": "val/MAP@R"},
        },
        "seeds": seeds,
        "baseline": "last epoch",
        "test": "paired",
        "scores": ("R@1", "MAP@R", "NMI"),
    }
