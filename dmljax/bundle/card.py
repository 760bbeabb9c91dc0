"""Writes the model card of a bundle: Markdown with YAML metadata for model hubs, and figures."""

import importlib.resources
import json
import math
import os
import pathlib
import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dmljax import metrics
from dmljax.bundle.files import Manifest, Rates, Threshold
from dmljax.config import method
from dmljax.config.fields import PATHS
from dmljax.data.splits import Split
from dmljax.files.run_folder import Result
from dmljax.files.writing import finite
from dmljax.index.nearest import SIMILARITIES
from dmljax.metrics.significance import FEWEST_CLASSES, LEVEL, limits
from dmljax.runs.frozen import Against, sentence
from dmljax.train.run import Run
from dmljax.weights import PUBLISHED, read_metadata
from dmljax.weights.published import identify

FMRS = (1e-2, 1e-3, 1e-4)
_BLOCK = 256  # queries
_SAMPLES = 1000
_ONNX = "\n`embed.onnx` takes `images`, uint8 [n height width channels], and gives `embeddings`."


def text(
    run: Run,
    manifest: Manifest,
    scores: Mapping[int, Mapping[str, Mapping[str, Any]]],
    *,
    against: Sequence[Against],
    step: int,
    result: Result | None,
    license: str | None,
) -> str:
    """Returns the card of a run's bundle: `card.md`, without the paragraphs that lack a value.

    `scores` are those of `scores_of` by the widths of the embeddings. `against` are scores of the
    pretrained backbone without training, and `result` is that of the exported `step`, if it exists.
    """
    thresholds, digest = manifest.thresholds, result and result.digests.get("data")
    overlap = len(set(run.train.names) & set(run.test.names))
    splits = ((x, f"{len(y):,}", f"{len(y.names):,}") for x, y in run.splits.items())
    first = next(iter(thresholds.values()), None)
    is_held_out = first is not None and first.chosen_on == "val"
    chosen, main = result and result.chosen, scores[manifest.output.dimension]
    selection = chosen.sentence if chosen else f"checkpoint of step {step} of {run.steps}"
    values = _program_values(manifest) | {
        "run": run,
        "net": run.options.net["name"],
        "selection": selection[0].upper() + selection[1:],
        "threshold": first,
        # JSON strings are YAML too, and need no further escapes.
        "license_lines": f"license: {json.dumps(license or 'other')}",
        "dataset": json.dumps(run.options.dataset["name"]),
        "metric_lines": "\n".join(f"- {json.dumps(x)}" for x in main) or "- recall",
        "data_set": _data_set(run),
        "kind": SIMILARITIES[manifest.output.similarity].sentence,
        "method": run.config["method"]["name"],
        "loss": run.config["loss"]["name"],
        "split_table": _table("split | images | classes", splits),
        "overlap": f"{overlap:,} of the {len(run.test.names):,} test classes are training classes",
        "data_digest": f" SHA-256 of its manifest: `{digest}`." if digest else "",
        "chosen_on": "the held-out" if is_held_out else "half of the test",
        "measured_on": "test split" if is_held_out else "other test classes",
        "level": metrics.level_text(),
        "score_table": _score_table(main, against),
        "against": sentence(against),
        "threshold_table": _threshold_table(thresholds),
        "prefix_table": _prefix_table(scores),
        "pretraining": _pretraining(method.first_weights(run.start_folder, run.weights)),
        "license": license or "not stated",
        "trained": "" if result is None else f"\n* Run digest: `{result.digests.get('run')}`",
    }
    conditions = {
        "if_test": chosen and chosen.uses_test,
        "if_scores": main,
        "if_no_scores": not main,
        "if_thresholds": manifest.output.unit and thresholds,
        "if_no_thresholds": manifest.output.unit and not thresholds,
        "if_frozen": against,
        "if_prefixes": len(scores) > 1,
        "if_boxes": run.test.boxes is not None,
    }
    values |= {name: "" for name, holds in conditions.items() if holds}
    return _filled(_template("card.md"), values)


def of_backbone(name: str, manifest: Manifest, *, license: str | None) -> str:
    """Returns the card of the net `name` of `weights.PUBLISHED`, which was not trained here."""
    values = _program_values(manifest) | {
        "name": name,
        "published": PUBLISHED[name],
        "license_lines": f"license: {json.dumps(license or 'other')}",
        "license": license or "the license of the weights",
        **({"if_words": ""} if manifest.text else {}),
        "trained": "",
    }
    sections = _template("card.md").split("\n\n## ")
    common = {x.partition("\n")[0]: f"## {x}" for x in sections[1:]}
    head, end = _template("backbone.md").split("\n\n## ")
    parts = [head, *(common[title] for title in ("Use", "Input", "Programs"))]
    return _filled("\n\n".join([*parts, f"## {end}", common["Versions"]]), values)


def _program_values(manifest: Manifest) -> dict[str, Any]:
    """Returns the values of paragraphs about the program, its input and its versions."""
    return {
        "manifest": manifest,
        "onnx": _ONNX if "embed.onnx" in manifest.files else "",
        "color": "RGB" if manifest.preprocess["channels"] == 3 else "gray",
        "operations": "\n".join(map(_operation, manifest.preprocess["operations"])),
        "program_table": _program_table(manifest.parity["programs"]),
        "platforms": ", ".join(manifest.program.platforms),
    }


def _template(name: str) -> str:
    text = importlib.resources.files("dmljax.bundle").joinpath(name).read_text("utf-8")
    return text.strip()


def _filled(template: str, values: Mapping[str, Any]) -> str:
    """Fills `template`, and drops paragraphs whose `{if_...}` is not in `values`, with titles."""
    paragraphs: list[str] = []
    for paragraph in template.split("\n\n"):
        if paragraphs and paragraphs[-1].startswith("## ") and paragraph.startswith("## "):
            paragraphs.pop()
        fields = [name for _, name, _, _ in string.Formatter().parse(paragraph) if name]
        if all(name in values for name in fields if name.startswith("if_")):
            paragraphs.append(paragraph.format_map(values))
    return "\n\n".join(paragraphs) + "\n"


def _table(titles: str, rows: Iterable[Iterable[Any]]) -> str:
    """Formats a table of Markdown; `titles` are separated by bars."""
    lines = [f"| {titles} |", "|---" * (titles.count("|") + 1) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def _operation(operation: Mapping[str, Any]) -> str:
    options = ", ".join(f"{k}={v}" for k, v in operation.items() if k != "name")
    return f"1. `{operation['name']}` ({options})"


def _pretraining(weights: str | None) -> str:
    """Returns the source of the initial weights and their license, as far as the file tells."""
    if not weights:
        return "none, all parameters are from this training"
    name = os.path.basename(weights)
    if not os.path.isfile(weights):
        return f"{name}, of unknown license (the file was missing at the export)"
    if published := identify(weights):
        return f"{published} (license: {PUBLISHED[published].license})"
    try:
        metadata = read_metadata(weights)
    except ValueError:
        return f"{name}, of unknown source and license"
    source = metadata["source"]
    origin = source.get("known_as") or source.get("file")
    return f"{name}, converted from {origin} (license: {metadata['license']})"


def _data_set(run: Run) -> str:
    """Returns the name of the data set, with the last part of its path."""
    spec = run.config["dataset"]
    paths = [pathlib.PurePath(spec[key]).name for key in PATHS["dataset"] if spec.get(key)]
    return " ".join([spec["name"], *paths[:1]])


def _score_table(scores: Mapping[str, Mapping[str, Any]], against: Sequence[Against]) -> str:
    rows = []
    for name, score in scores.items():
        name += ", mean over classes" if score["average"] == "classes" else ""
        interval = _range(score["interval"])
        rows.append((name, _percent(score["value"]), interval, f"{score['queries']:,}"))
    for row in against:
        if row.split == "test":
            limits = None if row.frozen_low is None else (row.frozen_low, row.frozen_high)
            name = f"{row.name} of the backbone without training"
            rows.append((name, _percent(row.frozen), _range(limits), rows[0][-1] if rows else "-"))
    return _table(
        f"test split | value | {metrics.level_text()} interval over classes | queries", rows
    )


def _threshold_table(thresholds: Mapping[str, Threshold]) -> str:
    rows = []
    for name, entry in thresholds.items():
        test = entry.test
        rates = (
            f"{_rate(rate)} ({_range(interval, _rate)})"
            for rate, interval in ((test.fmr, test.fmr_interval), (test.fnmr, test.fnmr_interval))
        )
        refused = _rate(test.known_refused), _rate(test.strangers_refused)
        rows.append((name, f"{entry.cosine:.4f}", *rates, *refused))
    titles = (
        "name | cosine | false match rate on test | false non-match rate on test | known refused | "
        "strangers refused"
    )
    return _table(titles, rows)


def _prefix_table(prefixes: Mapping[int, Mapping[str, Mapping[str, Any]]]) -> str:
    rows = (
        (dim, f"{4 * dim:,}", _percent(x["R@1"]["value"]), _percent(x["MAP@R"]["value"]))
        for dim, x in prefixes.items()
        if x
    )
    return _table("first numbers | bytes per item | R@1 | MAP@R", rows)


def _program_table(programs: Mapping[str, Any]) -> str:
    rows = []
    for name, report in programs.items():
        batch = report["largest_batch"]
        difference, cosine = batch["largest_difference"], batch["smallest_cosine"]
        same = _percent(report.get("same_nearest"))
        rows.append((name, report["images"], f"{difference:.1e}", f"{cosine:.7f}", same))
    return _table("program | images | largest difference | smallest cosine | same nearest", rows)


def _percent(value: float | None) -> str:
    return "-" if value is None or np.isnan(value) else f"{100 * value:.1f}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def _range(interval: Any, format_fn=_percent) -> str:
    return "-" if interval is None else f"{format_fn(interval[0])} to {format_fn(interval[1])}"


class Labeled(NamedTuple):
    """Embeddings of readable images, and their labels."""

    embeddings: np.ndarray
    labels: np.ndarray


def scores_of(
    embeddings: np.ndarray, split: Split, *, average: str = "queries"
) -> dict[str, dict[str, Any]]:
    """Computes R@1, R-precision and MAP@R by the split's protocol, with intervals over classes.

    `average` is as in `metrics.retrieval`.
    """
    search = split.search(embeddings)
    values = metrics.per_query(search.embeddings, search.labels, ks=(1,), **search.options)
    result = {}
    for name in ("R@1", "RP", "MAP@R"):
        if queries := int((~np.isnan(values[name])).sum()):
            interval = metrics.interval(values[name], groups=search.labels, over=average)
            result[name] = {
                "value": metrics.average(values[name], search.labels, over=average),
                "average": average,
                "interval": None if math.isnan(interval[0]) else [float(x) for x in interval],
                "queries": queries,
            }
    return result


def halves(data: Labeled) -> tuple[Labeled, Labeled]:
    """Returns the images of a random half of the classes, and the images of the other half."""
    classes = np.random.default_rng(0).permutation(np.unique(data.labels))
    first = np.isin(data.labels, classes[: len(classes) // 2])
    one, other = (Labeled(data.embeddings[x], data.labels[x]) for x in (first, ~first))
    return one, other


def thresholds(chosen_on: Labeled, test: Labeled, *, split: str) -> dict[str, Threshold]:
    """Chooses cosines from which two images count as one class, by the rate of false matches.

    They are chosen on the pairs of `chosen_on`, the images of `split`, and measured on pairs of
    `test`, and on each image of `test` as a query among all others (`metrics.stranger_rates`). The
    net must have seen neither set, because false matches among its training images are rare. The
    result is empty for fewer than 8 classes, and leaves out rates with fewer than 10 expected false
    matches.
    """
    if len(np.unique(chosen_on.labels)) < FEWEST_CLASSES:
        return {}
    histograms = metrics.similarity_histograms(chosen_on.embeddings, chosen_on.labels)
    pairs = int(histograms.negatives.sum())
    near = metrics.neighborhoods(test.embeddings, test.labels, k=1)
    result = {}
    for rate in metrics.offered_fmrs(histograms, FMRS):
        cosine = metrics.threshold_at_fmr(histograms, rate)
        refused = metrics.stranger_rates(near, cosine)
        measured = Rates(
            **_pair_rates(test, cosine),
            known_refused=finite(refused.known_refused),
            strangers_refused=finite(refused.strangers_refused),
        )
        name = f"fmr={rate:.0e}".replace("e-0", "e-")
        result[name] = Threshold(cosine, split, pairs, measured)
    return result


def _pair_rates(data: Labeled, cosine: float) -> dict[str, Any]:
    """Computes FMR and FNMR at a cosine; intervals draw whole classes with replacement.

    M[a, b] of the N[a, b] pairs of the classes a and b match. With weights w of the classes, FMR is
    sum_{a != b} w_a w_b M / sum_{a != b} w_a w_b N, and FNMR is the same over a = b with N - M in
    place of M, and w_a in place of its square: a class drawn twice brings its pairs twice.
    """
    classes, codes = np.unique(data.labels, return_inverse=True)
    order = np.argsort(codes, kind="stable")
    x, codes = data.embeddings[order].astype(np.float32), codes[order]
    starts, sizes = np.searchsorted(codes, np.arange(len(classes))), np.bincount(codes)
    pairs = (np.outer(sizes, sizes) - np.diag(sizes)).astype(float)  # ordered, none with itself
    matches = np.zeros_like(pairs)
    for start in range(0, len(x), _BLOCK):
        rows = slice(start, start + _BLOCK)
        passing = x[rows] @ x.T >= cosine
        passing[np.arange(len(passing)), np.arange(start, start + len(passing))] = False
        by_class = np.add.reduceat(passing, starts, axis=1, dtype=np.int64)
        np.add.at(matches, codes[rows], by_class)
    same_matches, same_pairs = np.diag(matches), np.diag(pairs)
    other_matches, other_pairs = matches - np.diag(same_matches), pairs - np.diag(same_pairs)

    def ratio(passing, count):
        return passing / np.where(count > 0, count, np.nan)

    def fmr(w):
        return ratio(*(np.sum((w @ x) * w, axis=1) for x in (other_matches, other_pairs)))

    def fnmr(w):
        return 1 - ratio(w @ same_matches, w @ same_pairs)

    count = len(classes)
    draws = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), _SAMPLES)
    rates: dict[str, Any] = {}
    for name, rate_fn in (("fmr", fmr), ("fnmr", fnmr)):
        rates[name] = finite(float(rate_fn(np.ones((1, count)))[0]))
        drawn = rate_fn(draws.astype(float))
        drawn = drawn[~np.isnan(drawn)] if count >= FEWEST_CLASSES else drawn[:0]
        rates[f"{name}_interval"] = tuple(limits(drawn, LEVEL)) if len(drawn) else None
    rates["different_pairs"] = int(other_pairs.sum()) // 2
    rates["same_pairs"] = int(same_pairs.sum()) // 2
    return rates
