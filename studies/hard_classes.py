"""Batches of classes that the net confuses, on characters; needs no download.

    dmljax study run studies/hard_classes.py --workers=2

The first row deals its classes at random. The others add to each dealt class the `near` classes
nearest to it, searched once an epoch (`nearest_classes`); batches have equally many classes and
images in all rows. Nothing else differs, and no step is chosen by test scores.
"""

from __future__ import annotations


def get_study(steps: int = 450, seeds: int = 5, loss: str = "multi_similarity"):
    near = {f"with the {n} nearest": {"name": "nearest_classes", "near": n} for n in (1, 3, 7)}
    samplers = {"random classes": {"name": "class_balanced"}, **near}
    size = {"classes": 32, "per_class": 4}
    return {
        "title": f"Hard classes in a batch, glyphs, {loss}",
        "base": "glyphs",
        "all": {"steps": steps, "evaluate.every": steps, "evaluate.seeds": [0], "pictures": False},
        "rows": {
            name: {"argument": f"loss={loss}", "sampler": {**sampler, **size}}
            for name, sampler in samplers.items()
        },
        "seeds": seeds,
        "baseline": "random classes",
        "test": "paired",
        "scores": ("R@1", "MAP@R", "NMI"),
    }
