"""Deep variational metric learning (Lin et al., ECCV 2018): three losses with and without it.

    dmljax study run studies/dvml_tables.py:dataset=cars196 --config.dataset.root=cars196 \\
        --config.net.weights=googlenet.safetensors

512 dimensions. The paper has one run of each row and does not say how it chose the step.
`table=deviation` reads the runs of the triplet loss for the paper's table 4: the deviation within
test classes, divided by the deviation between them. A lower value is better.
"""

from __future__ import annotations

LOSSES = {"triplet": "triplet", "npair": "N-pair", "dws": "distance-weighted"}
# NMI, F1 and R@K, without and with DVML.
PUBLISHED = {
    "cars196": {
        "triplet": ("56.2 21.3 58.5 68.8 77.1 84.2", "61.1 28.2 64.3 73.7 79.2 85.1"),
        "npair": ("62.9 31.9 72.3 79.9 86.8 90.9", "66.0 34.6 80.4 85.8 91.8 95.1"),
        "dws": ("65.4 34.3 78.9 85.6 91.0 94.7", "67.6 36.8 82.0 88.4 93.3 96.3"),
    },
    "cub200": {
        "triplet": ("52.7 19.8 39.8 51.9 63.7 74.5", "55.5 25.0 43.7 56.0 67.8 76.9"),
        "npair": ("60.1 27.1 50.6 63.1 73.8 82.2", "61.1 28.5 52.5 64.9 75.3 84.1"),
        "dws": ("58.0 24.8 49.8 61.6 73.2 83.6", "61.4 28.8 52.7 65.1 75.5 84.3"),
    },
    "sop": {
        "triplet": ("86.5 20.2 54.9 71.5 85.2", "89.0 31.1 66.5 82.3 91.8"),
        "npair": ("87.9 27.1 66.4 82.9 92.1", "90.2 37.1 70.0 85.1 93.7"),
        "dws": ("89.0 31.1 66.8 82.0 91.0", "90.8 37.2 70.2 85.2 93.8"),
    },
}

# Table 4, of test classes.
DEVIATIONS = {"cars196": (98.0, 57.1), "cub200": (105.8, 57.6), "sop": (73.5, 46.9)}


def get_study(dataset: str = "cars196", table: str = "scores", seeds: int = 5):
    if dataset not in PUBLISHED:
        raise ValueError(f"dataset is one of {', '.join(PUBLISHED)}, not {dataset!r}")
    if table not in ("scores", "deviation"):
        raise ValueError(f"table is scores or deviation, not {table!r}")
    ks = (1, 10, 100) if dataset == "sop" else (1, 2, 4, 8)
    scores = ("NMI", "F1", *(f"R@{k}" for k in ks))
    rows, published = {}, {}
    for loss, title in LOSSES.items():
        for i, argument in enumerate((f"loss={loss},baseline=True", f"loss={loss}")):
            row = f"{title} with DVML" if i else title
            # Every loss is compared with itself without DVML.
            rows[row] = {"argument": argument, "baseline": title if i else None}
            values = map(float, PUBLISHED[dataset][loss][i].split())
            published[row] = dict(zip(scores, values, strict=True))
    content = {
        "title": f"DVML, tables 1 to 3, {dataset}",
        "base": "dvml",
        "argument": f"dataset={dataset}",
        "all": {"pictures": None, "evaluate.metrics": ["all", "class_deviation"]},
        "rows": rows,
        "seeds": seeds,
        "test": "paired" if seeds >= 5 else "welch",
        "scores": scores,
        "published": published,
        "published_from": "Lin et al., 2018: 1 run each, the rule is not stated",
    }
    if table == "deviation":
        names = ("triplet", "triplet with DVML")
        values = zip(names, DEVIATIONS[dataset], strict=True)
        content |= {
            "title": f"DVML, table 4, {dataset}",
            "rows": {name: rows[name] for name in names},
            "scores": ("class_deviation",),
            "published": {name: {"class_deviation": value} for name, value in values},
        }
    return content
