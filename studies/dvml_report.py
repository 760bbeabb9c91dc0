"""The three experiments of a public report on DVML (Cars196, 128 dimensions), with their control.

    dmljax study run studies/dvml_report.py --config.dataset.root=cars196 \\
        --config.net.weights=googlenet.safetensors
    dmljax study run studies/dvml_report.py:mode=report ...

`mode=code_1600` and `mode=code_1200` are two versions of its code; which one made its numbers is
not known. `mode=report` is the form that its text describes. The report took the step with the best
NMI on the test classes. It has no row without DVML: `control` is that row.

The page of each run shows the four losses as the report plots them: each is multiplied by its
lambda, and L4 contains the weight decay. So L4 falls where lambda 4 falls, at the start of phase 2.
"""

from __future__ import annotations

SCORES = ("NMI", "F1", "R@1", "R@2", "R@4", "R@8", "R@16", "R@32")
PUBLISHED = {
    1: "56.8 23.1 54.3 65.9 76.9 84.7 90.6 94.8",
    2: "55.8 22.0 52.4 64.4 75.1 84.3 90.2 94.3",
    3: "55.1 21.0 51.1 63.7 74.4 83.3 89.7 94.2",
}


def get_study(mode: str = "code_1600", select: str = "test/NMI", seeds: int = 5):
    experiments = {f"experiment {n}": {"argument": f"experiment={n}"} for n in PUBLISHED}
    return {
        "title": f"The report on DVML, mode={mode}, Cars196",
        "base": "dvml",
        "argument": f"dataset=cars196,mode={mode}",
        "all": {"pictures": None},
        "rows": {
            "control": {"argument": "baseline=True"},
            **experiments,
            # The report draws one sample of z_V for each image, the paper 20.
            "20 samples": {"argument": "experiment=1", "method.samples": 20},
            "lambda 3 = 0": {
                "argument": "experiment=1",
                "method.lambdas": [[1.0, 0.5, 0.0, 1.0], [0.8, 1.0, 0.0, 0.8]],
            },
        },
        "seeds": seeds,
        "select": select,
        "baseline": "control",
        "test": "paired" if seeds >= 5 else "welch",
        "scores": SCORES,
        "published": {
            f"experiment {n}": dict(zip(SCORES, map(float, values.split()), strict=True))
            for n, values in PUBLISHED.items()
        },
        "published_from": "the report: 1 run each, the best NMI of the test classes among "
        "evaluations at every 200 steps",
    }
