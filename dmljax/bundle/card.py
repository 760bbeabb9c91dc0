"""The model card of a bundle: Markdown, with the YAML head that model hubs read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from dmljax.config.digests import PATHS
from dmljax.config.fields import named
from dmljax.data.splits import Split
from dmljax.files.result import Result
from dmljax.train.run import Run
from dmljax.weights import PUBLISHED, read_metadata
from dmljax.weights.published import identify

__all__ = ["Evidence", "pretraining", "text"]


class Evidence(NamedTuple):
    """The measurements of a card; `figures` makes its tables."""

    scores: Mapping[str, Mapping[str, Any]]
    selection: str  # which checkpoint this is, and why
    uses_test: bool  # whether test scores had a part in the choice
    thresholds: Mapping[str, Mapping[str, Any]]
    compression: Mapping[str, Mapping[str, float]]
    compression_images: int
    fitted_on: str


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
    """The card of a run's bundle."""
    source = pretraining(run.weights)
    sections = [
        _head(run, evidence, license),
        _summary(run, manifest),
        _use(manifest),
        _input(preprocess),
        _data(run, result),
        _scores(run, evidence),
        _thresholds(evidence, manifest),
        _compression(evidence, manifest),
        _parity(reports),
        f"## Pretraining and licenses\n\nPretraining: {source}.\n\n"
        f"License of this bundle: {license or 'not stated'}. It also depends on the training "
        "images, whose terms the exporter has to know.",
        _limits(run, manifest, evidence, preprocess),
        _versions(manifest, result),
        _cite(),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def pretraining(weights: str | None) -> str:
    """The source of the initial weights and their license, as far as the file tells."""
    if not weights:
        return "none, all parameters are from this training"
    name = os.path.basename(weights)
    if not os.path.isfile(weights):
        return f"{name}, of unknown license (the file was not there at the export)"
    if published := identify(weights):
        return f"{published} ({PUBLISHED[published].license})"
    try:
        metadata = read_metadata(weights)
    except ValueError:
        return f"{name}, of unknown source and license"
    source = metadata["source"]
    origin = source.get("known_as") or source.get("file")
    return f"{name}, converted from {origin} ({metadata['license']})"


def _head(run: Run, evidence: Evidence, license: str | None) -> str:
    """YAML; JSON strings are YAML too, and need no further escapes."""
    lines = ["---", "library_name: dmljax", "pipeline_tag: image-feature-extraction"]
    if license:
        lines.append(f"license: {json.dumps(license)}")
    else:
        lines += ["license: other", "license_name: not-stated"]
    lines += ["tags:", "- metric-learning", "- image-retrieval", "- jax"]
    lines += ["datasets:", f"- {json.dumps(run.dataset)}", "metrics:"]
    lines += [f"- {json.dumps(name)}" for name in evidence.scores] or ["- recall"]
    return "\n".join([*lines, "---"])


def _summary(run: Run, manifest: Mapping[str, Any]) -> str:
    output = manifest["output"]
    kind = "unit vectors, compared by their cosine" if output["unit"] else "compared by distance"
    h, w, c = run.eval_image_shape
    method, loss = (named(run.config[name])["name"] for name in ("method", "loss"))
    return (
        f"# Image embeddings: {run.net_name} on {_data_set(run)}\n\n"
        f"A {run.net_name} that maps an image ({w} x {h} x {c} after preprocessing) to "
        f"{output['dimension']} numbers ({kind}). Images of one class lie close together, also of "
        f"classes that were not in the training. Trained by the method {method} with the loss "
        f"{loss}."
    )


def _data_set(run: Run) -> str:
    """The name of the data set, with the last part of its path if it is the user's own."""
    spec = named(run.config["dataset"])
    own = spec["name"] in ("folder", "npz", "table")
    path = next((spec[key] for key in PATHS["dataset"] if own and spec.get(key)), None)
    return f"{spec['name']} {os.path.basename(os.path.normpath(path))}" if path else run.dataset


def _use(manifest: Mapping[str, Any]) -> str:
    lines = ["## Use", "", "```python", "import dmljax  # pip install dmljax[serve]", ""]
    lines += ['model = dmljax.bundle.load("photos.bundle")', 'x = model.embed(["a.jpg", "b.jpg"])']
    lines += [f"x.shape  # (2, {manifest['output']['dimension']})", "```", ""]
    lines.append("`dmljax bundle check photos.bundle` compares files, pixels and numbers.")
    if "embed.onnx" in manifest["files"]:
        lines.append(
            "`embed.onnx` takes `images`, uint8 [n height width channels], and gives `embeddings`."
        )
    return "\n".join(lines)


def _input(preprocess: Mapping[str, Any]) -> str:
    lines = ["## Input", "", f"Decoding: {preprocess['decode']}. Color: "]
    lines[-1] += f"{preprocess['input']['color']}. Then:"
    lines.append("")
    for operation in preprocess["operations"]:
        options = ", ".join(f"{k}={v}" for k, v in operation.items() if k != "name")
        lines.append(f"1. `{operation['name']}` ({options})")
    lines += ["", f"Normalization is {preprocess['normalization']}."]
    lines += ["`golden.safetensors` has encoded images, their pixels and their embeddings."]
    return "\n".join(lines)


def _data(run: Run, result: Result | None) -> str:
    lines = ["## Data", "", "| split | images | classes |", "|---|---|---|"]
    for name, split in run.splits.items():
        lines.append(f"| {name} | {len(split):,} | {len(split.names):,} |")
    overlap = len(set(run.train.names) & set(run.test.names))
    lines += ["", f"Data set: {_data_set(run)}. "]
    lines[-1] += (
        "No test class is a training class."
        if not overlap
        else f"{overlap:,} test classes are training classes."
    )
    if result is not None and result.digests.get("data"):
        lines[-1] += f" SHA-256 of its manifest: `{result.digests['data']}`."
    return "\n".join(lines)


def _scores(run: Run, evidence: Evidence) -> str:
    lines = ["## Scores", "", f"{evidence.selection}.", ""]
    if evidence.uses_test:
        lines += ["**Test scores had a part in this choice, so they are too high.**", ""]
    if not evidence.scores:
        return "\n".join([*lines, "No test image has another of its class: there are no scores."])
    lines += ["| test split | value | 95 % interval over classes | queries |", "|---|---|---|---|"]
    for name, score in evidence.scores.items():
        value, interval = _percent(score["value"]), _range(score["interval"])
        name += ", mean over classes" if score.get("average") == "classes" else ""
        lines.append(f"| {name} | {value} | {interval} | {score['queries']:,} |")
    lines += [
        "",
        f"Seed {run.seed}. The interval draws whole classes with replacement; it does not",
    ]
    lines[-1] += " contain the spread over training seeds."
    return "\n".join(lines)


def _thresholds(evidence: Evidence, manifest: Mapping[str, Any]) -> str:
    if manifest["output"]["similarity"] != "cosine":
        return ""
    lines = ["## Same or not the same", ""]
    if not evidence.thresholds:
        return "\n".join([*lines, "There are too few images to choose a threshold."])
    first = next(iter(evidence.thresholds.values()))
    source = "held-out classes" if first["chosen_on"] == "val" else "training classes"
    lines += [
        f"Two images count as the same from this cosine on. Chosen on {first['pairs']:,} pairs of "
        f"different {source}; measured on the test split, with 95 % intervals over classes.",
        "",
        "| name | cosine | false match rate on test | false non-match rate on test |",
        "|---|---|---|---|",
    ]
    for name, entry in evidence.thresholds.items():
        test = entry["test"]
        rates = (
            f"{_rate(test[rate])} ({_range(test[f'{rate}_interval'], _rate)})"
            for rate in ("fmr", "fnmr")
        )
        lines.append(f"| {name} | {entry['cosine']:.4f} | {' | '.join(rates)} |")
    lines += ["", f"Test pairs: {first['test']['different_pairs']:,} of different classes, "]
    lines[-1] += f"{first['test']['same_pairs']:,} of the same."
    if first["chosen_on"] == "train":
        lines[-1] += (
            " The net has seen the classes on which they were chosen, so that the rates on new "
            "classes are higher: train with --config.validation=0.2 for better thresholds."
        )
    return "\n".join(lines)


def _compression(evidence: Evidence, manifest: Mapping[str, Any]) -> str:
    if not evidence.compression:
        return ""
    lines = [
        "## Smaller embeddings",
        "",
        f"Measured on {evidence.compression_images:,} test images that search each other; stored "
        "vectors are compressed, queries are float32. recall@10 is the share of the 10 nearest by "
        "float32 that are also among the 10 nearest by the smaller form. Ranges, medians and main "
        f"directions (pca) come from {evidence.fitted_on}.",
        "",
        "| form | bytes per item | R@1 | MAP@R | recall@10 |",
        "|---|---|---|---|---|",
    ]
    for name, row in evidence.compression.items():
        figures = " | ".join(_percent(row[figure]) for figure in ("R@1", "MAP@R", "recall@10"))
        lines.append(f"| {name} | {row['bytes']:,} | {figures} |")
    lines += [
        "",
        "`first_K` takes the first K numbers; the training did not order them, so `pca_K`",
    ]
    lines[-1] += " is the better way to fewer dimensions. `model.codec(name)` encodes and compares."
    return "\n".join(lines)


def _parity(reports: Mapping[str, Any]) -> str:
    lines = ["## Programs", "", "Each program ran in a new process and was compared with the"]
    lines[-1] += f" checkpoint on test images ({reports['platform']})."
    lines += ["", "| program | images | largest difference | smallest cosine | same nearest |"]
    lines += ["|---|---|---|---|---|"]
    for name, report in reports["programs"].items():
        batch = report["largest_batch"]
        lines.append(
            f"| {name} | {report['images']} | {batch['largest_difference']:.1e} | "
            f"{batch['smallest_cosine']:.7f} | {_percent(report.get('same_nearest'))} |"
        )
    lines += ["", "`parity.json` has all figures, also of batches of one and of three."]
    return "\n".join(lines)


def _limits(
    run: Run, manifest: Mapping[str, Any], evidence: Evidence, preprocess: Mapping[str, Any]
) -> str:
    return "\n".join(
        ["## Limits", "", *(f"* {line}" for line in _limit_lines(run, manifest, evidence))]
        + [f"* {line}" for line in _image_limits(run.test, preprocess)]
    )


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


def _versions(manifest: Mapping[str, Any], result: Result | None) -> str:
    program = manifest["program"]
    lines = [
        "## Versions",
        "",
        f"* Model digest: `{manifest['model']}`",
        f"* Exported on {program['exported']} by dmljax {manifest['dmljax']}, "
        f"jax {program['jax']}, jaxlib {program['jaxlib']}, for {', '.join(program['platforms'])}",
        f"* JAX promises that versions released within six months of jaxlib {program['jaxlib']} "
        f"load the program: until {program['promised_until']} at most. A later version is accepted "
        "if it computes the stored examples; otherwise `dmljax bundle rebuild` makes a new program "
        "from config and parameters.",
    ]
    if result is not None:
        code = result.code or {}
        revision = f", revision {code['revision'][:12]}" if code.get("revision") else ""
        lines.append(f"* Trained by dmljax {result.versions.get('dmljax')}{revision}")
        lines.append(f"* Run digest: `{result.digests.get('run')}`")
    return "\n".join(lines)


def _cite() -> str:
    return (
        "## Citation\n\nCite the method and the data set by their papers (docs of dmljax name "
        "them), and this model by its digest."
    )


def _percent(value: float | None) -> str:
    return "-" if value is None or np.isnan(value) else f"{100 * value:.1f}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.2g}"


def _range(interval: Any, format_fn=_percent) -> str:
    return "-" if interval is None else f"{format_fn(interval[0])} to {format_fn(interval[1])}"
