"""A run becomes a bundle, if its programs compute what its checkpoint computes."""

import dataclasses
import datetime
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save as save_tensors

import dmljax
from dmljax import vectors
from dmljax.bundle import card, files, loading, models, parity, preprocessing, programs
from dmljax.data.records import Reader
from dmljax.data.splits import Split, images_of, subset
from dmljax.files import reading, writing
from dmljax.files import run_folder as results
from dmljax.files.run_folder import RunFolder
from dmljax.files.writing import atomic_folder
from dmljax.index.nearest import SIMILARITIES
from dmljax.metrics.significance import FEWEST_CLASSES
from dmljax.report.run import without_paths
from dmljax.runs import frozen
from dmljax.runs.folder import embedding, reopen
from dmljax.train.evaluation import MAIN, Evaluator
from dmljax.train.run import Run
from dmljax.train.step import TrainState

BATCH_SIZES = (1, 4, 16, 32, 64)
_CHECKED_IMAGES, _FEW = 256, 12  # few images also go through in batches of one and of three
_THRESHOLD_IMAGES = 5_000  # at most 12.5 million pairs
_PROMISE = datetime.timedelta(days=182)  # JAX promises that newer versions run a program


def export(
    workdir: str | os.PathLike,
    out: str | os.PathLike,
    *,
    step: int | None = None,
    onnx: bool = False,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    license: str | None = None,
    overrides: Sequence[str] = (),
    trust_modules: bool = False,
    allow_worse: bool = False,
) -> pathlib.Path:
    """Writes the bundle `out` of a finished run, and returns its path.

    A run that is worse than the pretrained backbone it started from, by `runs.frozen.check`, is
    refused unless `allow_worse`.

    The checkpoint is the one that the run's `select` chose, or the one of `step`. `onnx` adds a
    second program; `license` is what the card states; `runs.folder.reopen` explains `overrides` and
    `trust_modules`. The bundle appears whole, after every program has passed the comparison with
    the checkpoint on test images. Otherwise `MismatchedProgram` is raised and nothing is left.
    """
    workdir, out = reading.chosen_run(workdir), pathlib.Path(out)
    check_target(out, batch_sizes, onnx=onnx)
    _check_finished(workdir)
    run, state = reopen(workdir, step=step, overrides=overrides, trust_modules=trust_modules)
    preprocess = preprocessing.from_transform(run.config["eval_transform"], run.eval_image_shape)
    evaluator = Evaluator(run)
    test_embeddings = evaluator.embeddings(state, run.test)
    against = frozen.check(run, state, workdir, test_embeddings, evaluator, allow_worse=allow_worse)
    checkpoint_fn, arrays = embedding(run, state)
    variables = jax.device_get(arrays)
    on_device = jax.device_put(variables)

    def embed_fn(images):
        return np.asarray(checkpoint_fn(on_device, images), np.float32)

    test, config, classes = test_embeddings[MAIN], without_paths(run.config), len(run.train.names)
    config, model = models.at_size(config, variables, preprocess.shape, classes=classes)
    images = _test_images(run, preprocess)
    with atomic_folder(out) as folder:
        facts = {"classes": classes, "prefixes": run.method.prefixes, "batch_sizes": batch_sizes}
        facts["onnx"] = onnx
        manifest = write(folder, model, config, preprocess, embed_fn, images, **facts)
        result = results.read_if_any(workdir)
        if result and (result.chosen is None or result.chosen.step != int(state.step)):
            result = None  # of another checkpoint
        if manifest.output.unit:
            thresholds = _thresholds(run, state, evaluator, test)
            manifest = dataclasses.replace(manifest, thresholds=thresholds)
        average = run.options.evaluate.average
        widths = {*run.method.prefixes, test.shape[1]}
        x = {dim: test if dim == test.shape[1] else vectors.prefix(test, dim) for dim in widths}
        scores = {dim: card.scores_of(x[dim], run.test, average=average) for dim in sorted(x)}
        about = {"against": against, "step": int(state.step), "result": result, "license": license}
        markdown = card.text(run, manifest, scores, **about)
        (folder / files.CARD).write_text(markdown)
        files.write_manifest(folder, manifest)
    return out


def check_target(out: pathlib.Path, batch_sizes: Sequence[int], *, onnx: bool) -> None:
    """Raises unless a bundle can be written to `out` with these batch sizes and programs."""
    if not batch_sizes or min(batch_sizes) < 1:
        raise ValueError(f"batch sizes must be positive, not {list(batch_sizes)}")
    if onnx:
        models.check_onnx_installed()
    if os.path.lexists(out) and (not out.is_dir() or out.is_symlink() or any(out.iterdir())):
        raise FileExistsError(f"{out} exists and is not an empty folder: choose another --out")


def _check_finished(workdir: pathlib.Path) -> None:
    """Raises if a process is training in `workdir`."""
    try:
        if (lock := RunFolder(workdir).lock).exists():
            writing.lock(lock, shared=True).close()
    except writing.Taken as owner:
        raise ValueError(
            f"{workdir} is still training ({owner}): wait until it has finished"
        ) from None


def _test_images(run: Run, preprocess: preprocessing.Preprocessing) -> np.ndarray:
    """Returns inputs `uint8 [n h w c]` of readable test images: whole classes in random order."""
    read = Reader(images_of(run.test), cache=False, least_side=preprocess.least_side)
    images: list[np.ndarray] = []
    for row in _rows_by_class(run.test):
        try:
            images.append(preprocess(read(int(row))))
        except ValueError:
            if run.options.unreadable != "skip":
                raise
        if len(images) == _CHECKED_IMAGES:
            break
    if not images:
        raise ValueError("the programs cannot be compared: no image of the test split is readable")
    return np.stack(images)


def _rows_by_class(split: Split, most: int | None = None) -> np.ndarray:
    """Returns the rows of whole classes in random order, or the first `most` of each class."""
    classes = np.argsort(np.random.default_rng(0).permutation(len(split.names)))
    return np.concatenate([np.flatnonzero(split.labels == x)[:most] for x in classes])


def _thresholds(
    run: Run, state: TrainState, evaluator: Evaluator, test: np.ndarray
) -> dict[str, files.Threshold]:
    """Chooses thresholds on held-out classes, or on half of the test classes."""
    # Large classes leave room for others: two halves of 8 classes have them.
    most = _THRESHOLD_IMAGES // (2 * FEWEST_CLASSES)

    def sample(split: Split, embed_fn: Callable[[np.ndarray], np.ndarray]) -> card.Labeled:
        rows = np.sort(_rows_by_class(split, most)[:_THRESHOLD_IMAGES])
        embeddings = embed_fn(rows)
        readable = np.isfinite(embeddings).all(axis=1)
        return card.Labeled(embeddings[readable], split.labels[rows][readable])

    measured_on, held_out = sample(run.test, test.__getitem__), run.held_out
    if held_out is None or len(held_out.names) < FEWEST_CLASSES:
        return card.thresholds(*card.halves(measured_on), split="test")
    chosen_on = sample(
        held_out, lambda rows: evaluator.embeddings(state, subset(held_out, rows))[MAIN]
    )
    return card.thresholds(chosen_on, measured_on, split="val")


def write(
    folder: pathlib.Path,
    model: models.Model,
    config: Mapping[str, Any],
    preprocess: preprocessing.Preprocessing,
    embed_fn: Callable[[np.ndarray], np.ndarray],
    images: np.ndarray | None = None,
    *,
    onnx: bool = False,
    **facts: Any,
) -> files.Manifest:
    """Writes parameters, programs and golden images, compared with `embed_fn` on `images`.

    Without `images`, the golden images take their place. See `describe` about `facts`.
    The manifest is returned with the reports of the comparison, and written without them.
    """
    golden = parity.golden(preprocess)
    golden["embeddings"] = embed_fn(golden["inputs"])
    write_program(folder, model, golden, (files.PARAMS, files.PROGRAM, files.GOLDEN))
    manifest = describe(model.tensors, config, preprocess, golden["embeddings"], **facts)
    manifest = files.write_manifest(folder, manifest)
    if onnx:
        models.write_onnx(folder)
        manifest = files.write_manifest(folder, manifest)
    images = golden["inputs"] if images is None else images
    net = loading.Bundle(folder, manifest, preprocess, embed_fn, manifest.batch_sizes[-1:])
    reference = net.embed_prepared(images)
    limits = parity.limits(manifest.output.precision, programs.platform())
    reports: dict[str, Any] = {"platform": programs.platform(), "programs": {}}
    sizes = {"largest_batch": manifest.batch_sizes[-1], "one": 1, "three": 3}
    for program in loading.PROGRAMS[: 1 + onnx]:
        bundle, outputs = loading.load(folder, program=program), {}
        for name, size in sizes.items():
            bundle.batch_sizes, rows = (size,), len(images) if name == "largest_batch" else _FEW
            outputs[name] = bundle.embed_prepared(images[:rows])
        report = parity.compare(reference, outputs, limits=limits, program=program)
        reports["programs"][program] = report
    return dataclasses.replace(manifest, parity=reports)


def write_program(
    folder: pathlib.Path,
    model: models.Model,
    golden: dict[str, np.ndarray],
    names: tuple[str, str, str],
) -> None:
    """Writes the parameters, the program and the stored examples of a model to files."""
    data = save_tensors(model.tensors), models.stablehlo(model).serialize(), save_tensors(golden)
    for name, content in zip(names, data, strict=True):
        (folder / name).write_bytes(content)


def describe(
    tensors: Mapping[str, np.ndarray],
    config: Mapping[str, Any],
    preprocess: preprocessing.Preprocessing,
    embeddings: np.ndarray,
    *,
    batch_sizes: Sequence[int],
    classes: int,
    prefixes: Sequence[int] = (),
) -> files.Manifest:
    """Returns the manifest of a model that has these `embeddings [n d]` of some images."""
    unit = bool(np.allclose(np.linalg.norm(embeddings, axis=1), 1, atol=vectors.UNIT_TOLERANCE))
    net, method = config["net"], config["method"]
    precision = str(net.get("dtype") or method.get("dtype") or "float32")
    today = datetime.datetime.now(datetime.UTC).date()
    similarity = next(x.name for x in SIMILARITIES.values() if x.needs_unit == unit)
    return files.Manifest(
        format=files.FORMAT,
        dmljax=dmljax.__version__,
        model=files.model_digest(tensors, preprocess.to_json(), config),
        config=dict(config),
        preprocess=preprocess.to_json(),
        output=files.Output(embeddings.shape[1], unit, similarity, precision),
        program=files.Program(
            platforms=models.PLATFORMS,
            jax=jax.__version__,
            jaxlib=jax.lib.__version__,
            exported_on=programs.platform(),
            exported=today.isoformat(),
            promised_until=(today + _PROMISE).isoformat(),
        ),
        batch_sizes=tuple(sorted(set(batch_sizes))),
        classes=classes,
        prefixes=tuple(prefixes),
    )
