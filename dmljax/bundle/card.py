"""The model card of a bundle: Markdown, with the YAML head that model hubs read."""

import importlib.resources
import json
import os
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dmljax.config import method
from dmljax.config.fields import PATHS, named
from dmljax.data.splits import Split
from dmljax.files.result import Result
from dmljax.metrics import level_text
from dmljax.runs.frozen import Against, sentence
from dmljax.train.run import Run
from dmljax.weights import PUBLISHED, read_metadata
from dmljax.weights.published import identify

_ONNX = "\n`embed.onnx` takes `images`, uint8 [n height width channels], and gives `embeddings`."
_SEEN_NOTE = (
    " {:,} of the test classes are training classes: among classes that the net has not seen, "
    "false matches are more frequent."
)
_DISJOINT = "No test class is a training class"
_NOT_STATED = "license: other\nlicense_name: not-stated"


class Evidence(NamedTuple):
    """The measurements of a card; `figures` makes its tables."""

    scores: Mapping[str, Mapping[str, Any]]
    against: Sequence[Against]  # the pretrained backbone without training, if there is one
    selection: str  # which checkpoint this is, and why
    uses_test: bool  # whether test scores had a part in the choice
    thresholds: Mapping[str, Mapping[str, Any]]
    compression: Mapping[str, Mapping[str, float]]
    compression_images: int
    fitted_on: str
    prefixes: Mapping[int, Mapping[str, Mapping[str, Any]]]  # scores by widths


def text(
    run: Run,
    manifest: Mapping[str, Any],
    reports: Mapping[str, Any],
    preprocess: Mapping[str, Any],
    evidence: Evidence,
    *,
    result: Result | None,
    license: str | None,
) -> str:
    """The card of a run's bundle: `card.md`, without the paragraphs that lack a value."""
    cosine = manifest["output"]["similarity"] == "cosine"
    thresholds, digest = evidence.thresholds, result and result.digests.get("data")
    overlap = len(set(run.train.names) & set(run.test.names))
    limits = [*_limit_lines(run, manifest, evidence), *_image_limits(run.test, preprocess)]
    # JSON strings are YAML too, and need no further escapes.
    license_lines = f"license: {json.dumps(license)}" if license else _NOT_STATED
    splits = ((x, f"{len(y):,}", f"{len(y.names):,}") for x, y in run.splits.items())
    first = next(iter(thresholds.values()), {"chosen_on": None})
    values = _program_values(manifest, reports, preprocess) | {
        "run": run,
        "evidence": evidence,
        "threshold": first,
        "shape": run.eval_image_shape,
        "license_lines": license_lines,
        "dataset": json.dumps(run.options.dataset["name"]),
        "metric_lines": "\n".join(f"- {json.dumps(x)}" for x in evidence.scores) or "- recall",
        "data_set": _data_set(run),
        "kind": "unit vectors, compared by their cosine" if cosine else "compared by distance",
        "method": named(run.config["method"])["name"],
        "loss": named(run.config["loss"])["name"],
        "split_table": _table("split | images | classes", splits),
        "overlap": f"{overlap:,} test classes are training classes" if overlap else _DISJOINT,
        "data_digest": f" SHA-256 of its manifest: `{digest}`." if digest else "",
        "chosen_on": "the held-out" if first["chosen_on"] == "val" else "half of the test",
        "measured_on": "test split" if first["chosen_on"] == "val" else "other test classes",
        "seen_note": _SEEN_NOTE.format(overlap) if overlap else "",
        "level": level_text(),
        "score_table": _score_table(evidence),
        "against": sentence(evidence.against),
        "threshold_table": _threshold_table(thresholds),
        "compression_table": _compression_table(evidence.compression),
        "prefix_table": _prefix_table(evidence.prefixes),
        "prefix_words": " or by a prefix" if evidence.prefixes else "",
        "pretraining": pretraining(method.first_weights(run.start_folder, run.weights)),
        "license": license or "not stated",
        "limits": "\n".join(f"* {line}" for line in limits),
        "trained": _trained(result),
    }
    conditions = {
        "if_test": evidence.uses_test,
        "if_scores": evidence.scores,
        "if_no_scores": not evidence.scores,
        "if_thresholds": cosine and thresholds,
        "if_no_thresholds": cosine and not thresholds,
        "if_compression": evidence.compression,
        "if_frozen": evidence.against,
        "if_untrained": evidence.compression and not evidence.prefixes,
        "if_prefixes": evidence.prefixes,
    }
    values |= {name: "" for name, holds in conditions.items() if holds}
    return _filled(_template("card.md"), values)


def _program_values(
    manifest: Mapping[str, Any], reports: Mapping[str, Any], preprocess: Mapping[str, Any]
) -> dict[str, Any]:
    """The values of paragraphs about the program, its input and its versions."""
    return {
        "manifest": manifest,
        "output": manifest["output"],
        "program": manifest["program"],
        "reports": reports,
        "preprocess": preprocess,
        "onnx": _ONNX if "embed.onnx" in manifest["files"] else "",
        "operations": "\n".join(map(_operation, preprocess["operations"])),
        "program_table": _program_table(reports["programs"]),
        "platforms": ", ".join(manifest["program"]["platforms"]),
    }


def _template(name: str) -> str:
    text = importlib.resources.files("dmljax.bundle").joinpath(name).read_text("utf-8")
    return text.strip()


def _filled(template: str, values: Mapping[str, Any]) -> str:
    """`template` without paragraphs whose `{if_...}` is not among `values`, and their titles."""
    paragraphs: list[str] = []
    for paragraph in template.split("\n\n"):
        if paragraphs and paragraphs[-1].startswith("## ") and paragraph.startswith("## "):
            paragraphs.pop()
        fields = [name for _, name, _, _ in string.Formatter().parse(paragraph) if name]
        if all(name in values for name in fields if name.startswith("if_")):
            paragraphs.append(paragraph.format_map(values))
    return "\n\n".join(paragraphs) + "\n"


def _table(titles: str, rows: Iterable[Iterable[Any]]) -> str:
    """A table of Markdown; `titles` are separated by bars."""
    lines = [f"| {titles} |", "|---" * (titles.count("|") + 1) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def _operation(operation: Mapping[str, Any]) -> str:
    options = ", ".join(f"{k}={v}" for k, v in operation.items() if k != "name")
    return f"1. `{operation['name']}` ({options})"


def of_backbone(
    name: str,
    manifest: Mapping[str, Any],
    reports: Mapping[str, Any],
    preprocess: Mapping[str, Any],
    *,
    license: str | None,
) -> str:
    """The card of a bundle of the net `name` of `weights.PUBLISHED`, which was not trained here."""
    published = PUBLISHED[name]
    values = _program_values(manifest, reports, preprocess) | {
        "name": name,
        "published": published,
        "license_lines": f"license: {json.dumps(license or 'other')}",
        "license": license or "the license of the weights",
        **({"if_words": ""} if "text" in manifest else {}),
        "trained": "",
    }
    sections = _template("card.md").split("\n\n## ")
    common = {x.partition("\n")[0]: f"## {x}" for x in sections[1:]}
    head, end = _template("backbone.md").split("\n\n## ")
    parts = [head, *(common[title] for title in ("Use", "Input", "Programs"))]
    return _filled("\n\n".join([*parts, f"## {end}", common["Versions"]]), values)


def pretraining(weights: str | None) -> str:
    """The source of the initial weights and their license, as far as the file tells."""
    if not weights:
        return "none, all parameters are from this training"
    name = os.path.basename(weights)
    if not os.path.isfile(weights):
        return f"{name}, of unknown license (the file was not there at the export)"
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
    """The name of the data set, with the last part of its path if it is the user's own."""
    spec = named(run.config["dataset"])
    has_path = spec["name"] in ("folder", "npz", "table")
    path = next((spec[key] for key in PATHS["dataset"] if has_path and spec.get(key)), None)
    return (
        f"{spec['name']} {os.path.basename(os.path.normpath(path))}"
        if path
        else run.options.dataset["name"]
    )


def _score_table(evidence: Evidence) -> str:
    rows = []
    for name, score in evidence.scores.items():
        name += ", mean over classes" if score.get("average") == "classes" else ""
        interval = _range(score["interval"])
        rows.append((name, _percent(score["value"]), interval, f"{score['queries']:,}"))
    queries = next((f"{score['queries']:,}" for score in evidence.scores.values()), "-")
    for row in evidence.against:
        if row.split == "test":
            interval = None if row.frozen_low is None else (row.frozen_low, row.frozen_high)
            name = f"{row.name} of the backbone without training"
            rows.append((name, _percent(row.frozen), _range(interval), queries))
    return _table(f"test split | value | {level_text()} interval over classes | queries", rows)


def _threshold_table(thresholds: Mapping[str, Any]) -> str:
    rows = []
    for name, entry in thresholds.items():
        test = entry["test"]
        rates = (
            f"{_rate(test[rate])} ({_range(test[f'{rate}_interval'], _rate)})"
            for rate in ("fmr", "fnmr")
        )
        refused = (_rate(test[name]) for name in ("known_refused", "strangers_refused"))
        rows.append((name, f"{entry['cosine']:.4f}", *rates, *refused))
    titles = (
        "name | cosine | false match rate on test | false non-match rate on test | known refused | "
        "strangers refused"
    )
    return _table(titles, rows)


def _compression_table(compression: Mapping[str, Mapping[str, float]]) -> str:
    rows = (
        (name, f"{row['bytes']:,}", *(_percent(row[x]) for x in ("R@1", "MAP@R", "recall@10")))
        for name, row in compression.items()
    )
    return _table("form | bytes per item | R@1 | MAP@R | recall@10", rows)


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


def _limit_lines(run: Run, manifest: Mapping[str, Any], evidence: Evidence) -> Iterator[str]:
    yield (
        f"The scores hold for images such as the images of {_data_set(run)}. Nothing was measured "
        "on other images, on people, or for decisions about people."
    )
    low = [name for name, score in evidence.scores.items() if score["interval"] is None]
    if low:
        yield "The test split has fewer than 8 classes, too few for intervals."
    if manifest["output"]["precision"] != "float32":
        yield f"The net computes in {manifest['output']['precision']}."
    yield (
        "Accelerators round the inputs of products; embeddings made on one may differ from those "
        "of a CPU by up to 1e-2 in a coordinate. Do not mix them in one index without a check."
    )


def _image_limits(test: Split, preprocess: Mapping[str, Any]) -> Iterator[str]:
    if test.boxes is not None:
        yield "Training and test images were cropped to given boxes. Crop queries in the same way."
    first = preprocess["operations"][0] if preprocess["operations"] else {}
    if first.get("name") == "resize" and first.get("antialias"):
        size = f"{first['width']} x {first['height']}"
        yield f"All images of the data set had {size} pixels. Others are resized to that size."


def _trained(result: Result | None) -> str:
    if result is None:
        return ""
    code = result.code or {}
    revision = f", revision {code['revision'][:12]}" if code.get("revision") else ""
    version, run = result.versions.get("dmljax"), result.digests.get("run")
    return f"\n* Trained by dmljax {version}{revision}\n* Run digest: `{run}`"


def _percent(value: float | None) -> str:
    return "-" if value is None or np.isnan(value) else f"{100 * value:.1f}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def _range(interval: Any, format_fn=_percent) -> str:
    return "-" if interval is None else f"{format_fn(interval[0])} to {format_fn(interval[1])}"
