"""Measures the numbers of a report at the size of Stanford Online Products.

`python benchmarks/report.py` prints one line per step: wall-clock seconds, and processor time
over all cores. `--share 0.25` takes a quarter of the items. The data are synthetic.
"""

import argparse
import resource

import jax
import numpy as np
from evaluation import products, seconds

from dmljax import metrics
from dmljax.main import settle_environment, tune_cpu
from dmljax.report import findings, projection


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--share", type=float, default=1.0, help="of 60,502 items and 11,316 classes"
    )
    parser.add_argument("--dimensions", type=int, default=512)
    parser.add_argument("--no-map", action="store_true", help="leave t-SNE out")
    arguments = parser.parse_args()
    items, classes = round(60_502 * arguments.share), round(11_316 * arguments.share)
    x, labels = products(items, classes, arguments.dimensions)
    results: dict = {}

    def step(name, function):
        clock, processor = seconds(lambda: results.update({name: function()}))
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"| {name} | {clock:.1f} | {processor:.1f} | {memory:.2f} |", flush=True)

    print(f"{items:,} x {arguments.dimensions}, {classes:,} classes, {jax.devices()[0].platform}")
    print("| step | clock, s | processor, s | peak memory so far, GiB |\n|---|---|---|---|")
    names = ("RP", "MAP@R", "MRR")
    fns = {name: metrics.RANKING_FNS[name] for name in names}
    step("per_query", lambda: metrics.per_query(x, labels, ks=(1,), metric_fns=fns))
    values = results["per_query"]
    step("neighborhoods, k=10", lambda: metrics.neighborhoods(x, labels))
    near = results["neighborhoods, k=10"]
    step("similarity_histograms", lambda: metrics.similarity_histograms(x, labels))
    histograms = results["similarity_histograms"]
    recalls = values["R@1"]
    scores = (recalls, values["MAP@R"], values["RP"], values["MRR"])
    step("interval, 4 scores", lambda: [metrics.interval(v, groups=labels) for v in scores])
    count = int(labels.max()) + 1
    step(
        "class_table",
        lambda: findings.class_table(x, labels, recalls, values["MAP@R"], count=count),
    )
    step("confusions", lambda: findings.confusions(labels, recalls, near.other))
    step("hubs", lambda: findings.hub_counts(near.nearest, labels))
    step(
        "suspected_labels",
        lambda: findings.suspected_labels(near, histograms, recalls, dimension=x.shape[1]),
    )
    own = near.own_similarity[near.own >= 0]
    threshold = float(np.quantile(own, 0.99))
    step("near_duplicates", lambda: findings.near_duplicates(x, labels, threshold=threshold))
    step("spectrum, rho_spectrum", lambda: (metrics.spectrum(x), metrics.rho_spectrum(x)))
    step("density", lambda: metrics.density(x, labels))
    if not arguments.no_map:
        step("map_positions", lambda: projection.map_positions(x, labels))
    print(f"\nR@1 {np.nanmean(recalls):.3f}")


if __name__ == "__main__":
    settle_environment()
    tune_cpu()
    main()
