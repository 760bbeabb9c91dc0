"""Batches of classes that the net confuses, against batches of random classes.

    dmljax study run studies/hard_classes.py:data=emoji5

emoji5.npz lies in the current folder, or `--config.dataset.path=FILE` says where; it has images,
labels, class_names and class_is_test. The first row deals its classes at random. The others add to
each dealt class the `near` classes nearest to it, searched once per `every` steps
(`nearest_classes`). Batches have equally many classes and images in all rows. Nothing else differs,
and no step is chosen by test scores.
"""

from __future__ import annotations


def get_study(
    data: str = "images",
    size: int = 32,
    steps: int = 300,
    every: int = 30,
    seeds: int = 5,
    loss: str = "multi_similarity",
):
    rows = {"random classes": {"name": "class_balanced"}} | {
        f"with the {near} nearest": {"name": "nearest_classes", "near": near} for near in (1, 3)
    }
    batch = {"classes": 32, "per_class": 4}
    distortion = {"name": "distort", "rotation": 10, "shear": 0.15, "scale": (0.85, 1.15)}
    distortion |= {"shift": size // 16, "invert": 0, "noise": 0, "outside": "nearest"}
    return {
        "title": f"Hard classes in a batch, {data}, {loss}",
        "base": "glyphs",
        "all": {
            "dataset": {"name": "npz", "path": f"{data}.npz"},
            "transform": distortion,
            "net.strides": (2, 1, 2, 1, 2) if size <= 32 else (2, 2, 2, 1, 2),
            "steps": steps,
            "sampler.every": every,
            "evaluate.every": steps,
            "evaluate.clustering.seeds": [0],
            "pictures": None,
        },
        "rows": {
            name: {"argument": f"loss={loss}", "sampler": {**sampler, **batch}}
            for name, sampler in rows.items()
        },
        "seeds": seeds,
        "baseline": "random classes",
        "test": "paired",
        "scores": ("R@1", "MAP@R", "NMI"),
    }
