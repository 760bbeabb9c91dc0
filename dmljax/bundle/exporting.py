"""A run becomes a bundle, if its programs compute what its checkpoint computes."""

import contextlib
import dataclasses
import datetime
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save as save_tensors

import dmljax
from dmljax.bundle import card, figures, files, loading, models, parity, preprocessing, programs
from dmljax.config.fields import named
from dmljax.data.records import Reader
from dmljax.data.splits import Split, images_of, subset
from dmljax.files import locks, reading
from dmljax.files import result as results
from dmljax.files.result import Result
from dmljax.files.writing import make_folder, sync
from dmljax.metrics.significance import FEWEST_CLASSES
from dmljax.runs import frozen
from dmljax.runs.folder import embedding, reopen
from dmljax.train.evaluation import MAIN, Evaluation, Evaluator
from dmljax.train.run import Run
from dmljax.train.step import TrainState

BATCH_SIZES = (1, 4, 16, 32, 64)
_CHECKED_IMAGES = 256
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
    with _finished(workdir):
        run, state = reopen(workdir, step=step, overrides=overrides, trust_modules=trust_modules)
    preprocess = preprocessing.from_transform(run.config["eval_transform"], run.eval_image_shape)
    if not callable(getattr(run.method, "embed", None)):
        method = named(run.config["method"])["name"]
        raise ValueError(f"the method {method!r} lacks the function embed, which a bundle needs")
    evaluator = Evaluator(run)
    test_embeddings = evaluator.embeddings(state, run.test)
    against = frozen.check(
        run,
        state,
        workdir,
        Evaluation({}, test_embeddings),
        evaluator,
        allow_worse=allow_worse,
    )
    checkpoint_fn, arrays = embedding(run, state)
    variables = jax.device_get(arrays)
    on_device = jax.device_put(variables)

    def embed_fn(images):
        return np.asarray(checkpoint_fn(on_device, images), np.float32)

    shape, classes = run.eval_image_shape, len(run.train.names)
    config, variables = models.at_size(without_paths(run.config), variables, shape)
    model = models.with_values(models.model_of(config, shape, classes=classes), variables)
    images, labels = _test_images(run, preprocess, limit=_CHECKED_IMAGES)
    with written_whole(out) as folder:
        facts = {"classes": classes, "prefixes": run.method.prefixes, "batch_sizes": batch_sizes}
        manifest = write_model(folder, model, config, preprocess, embed_fn, **facts)
        manifest = write_proof(folder, manifest, preprocess, embed_fn, images, labels, onnx=onnx)
        result = results.read_if_any(workdir)
        if result is not None and (result.chosen is None or result.chosen.step != int(state.step)):
            result = None  # of another checkpoint
        if manifest.output.unit:
            thresholds = _thresholds(run, state, evaluator, test_embeddings[MAIN])
            manifest = dataclasses.replace(manifest, thresholds=thresholds)
        evidence = _evidence(run, state, result, test_embeddings[MAIN], against)
        markdown = card.text(run, manifest, evidence, result=result, license=license)
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


@contextlib.contextmanager
def _finished(workdir: pathlib.Path) -> Iterator[None]:
    """Raises if a process is training in `workdir`."""
    with contextlib.ExitStack() as stack:
        if (workdir / "lock").exists():
            try:
                stack.enter_context(locks.lock(workdir / "lock", shared=True))
            except locks.Taken as owner:
                raise ValueError(
                    f"{workdir} is still training ({owner}): wait until it has finished"
                ) from None
        yield


@contextlib.contextmanager
def written_whole(out: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a new folder next to `out`, and renames it to `out` if the block raises no error."""
    make_folder(out.parent)
    folder = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        folder.mkdir()
        yield folder
        for path in [*folder.iterdir(), folder]:
            sync(path)
        os.rename(folder, out)
        sync(out.parent)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and error.filename is None:
            raise
        raise OSError(f"{out} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _test_images(
    run: Run, preprocess: preprocessing.Preprocessing, *, limit: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs `uint8 [n h w c]` and labels of test images: whole classes in random order."""
    split = run.test
    read = Reader(images_of(split), cache=False, least_side=preprocess.least_side)
    images: list[np.ndarray] = []
    labels: list[int] = []
    for row in _rows_by_class(split):
        if len(images) == limit:
            break
        try:
            images.append(preprocess(read(int(row))))
            labels.append(split.labels[row])
        except ValueError:
            if run.options.unreadable != "skip":
                raise
    if not images:
        raise ValueError("the programs cannot be compared: no image of the test split is readable")
    return np.stack(images), np.array(labels)


def _rows_by_class(split: Split) -> np.ndarray:
    order = np.random.default_rng(0).permutation(len(split.names))
    return np.argsort(order[split.labels], kind="stable")


def _evidence(
    run: Run,
    state: TrainState,
    result: Result | None,
    test: np.ndarray,
    against: Sequence[frozen.Against],
) -> card.Evidence:
    """Computes the scores of the card."""
    selection, uses_test = f"Checkpoint of step {int(state.step)} of {run.steps}", False
    if result is not None and result.chosen is not None:
        selection, uses_test = result.chosen.sentence, result.chosen.uses_test
        selection = selection[0].upper() + selection[1:]
    average = run.options.evaluate.average
    scores = figures.scores(test, run.test, average=average)
    prefixes = figures.by_prefix(test, run.test, run.method.prefixes, average=average)
    if run.method.prefixes:
        prefixes[test.shape[1]] = scores
    return card.Evidence(scores, against, selection, uses_test, prefixes)


def _thresholds(
    run: Run, state: TrainState, evaluator: Evaluator, test: np.ndarray
) -> dict[str, files.Threshold]:
    """Chooses thresholds on held-out classes, or on half of the test classes."""
    # Large classes leave room for others: two halves of 8 classes have them.
    most = _THRESHOLD_IMAGES // (2 * FEWEST_CLASSES)

    def sample(split: Split, embeddings: np.ndarray | None = None) -> figures.Labeled:
        """Returns readable images, the first `most` of each class, class by class."""
        rows = _rows_by_class(split)
        starts = np.flatnonzero(np.diff(split.labels[rows], prepend=-1))  # of classes
        within = np.arange(len(rows)) - np.repeat(starts, np.diff(starts, append=len(rows)))
        rows = np.sort(rows[within < most][:_THRESHOLD_IMAGES])
        if embeddings is None:
            embeddings = evaluator.embeddings(state, subset(split, rows))[MAIN]
        else:
            embeddings = embeddings[rows]
        readable = np.isfinite(embeddings).all(axis=1)
        return figures.Labeled(embeddings[readable], split.labels[rows][readable])

    measured_on = sample(run.test, test)
    if run.held_out is not None and len(run.held_out.names) >= FEWEST_CLASSES:
        return figures.thresholds(sample(run.held_out), measured_on, split="val")
    return figures.thresholds(*figures.halves(measured_on), split="test")


def write_model(
    folder: pathlib.Path,
    model: models.Model,
    config: Mapping[str, Any],
    preprocess: preprocessing.Preprocessing,
    embed_fn: Callable[[np.ndarray], np.ndarray],
    **facts: Any,
) -> files.Manifest:
    """Writes parameters, program, golden images and manifest; see `describe` about `facts`.

    `embed_fn` computes the embeddings that belong to the golden images.
    """
    arrays = _contiguous(model.tensors)
    (folder / files.PARAMS).write_bytes(save_tensors(arrays))
    (folder / files.PROGRAM).write_bytes(models.serialized(models.stablehlo(model)))
    golden = parity.golden(preprocess)
    golden["embeddings"] = embed_fn(golden["inputs"])
    (folder / files.GOLDEN).write_bytes(save_tensors(golden))
    manifest = describe(arrays, config, preprocess, golden["embeddings"], **facts)
    return files.write_manifest(folder, manifest)


def _contiguous(tensors: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {path: np.ascontiguousarray(x) for path, x in tensors.items()}


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
    unit = bool(np.allclose(np.linalg.norm(embeddings, axis=1), 1, atol=1e-3))
    net, method = (c if isinstance(c, dict) else {} for c in (config["net"], config["method"]))
    precision = str(net.get("dtype") or method.get("dtype") or "float32")
    today = datetime.datetime.now(datetime.UTC).date()
    similarity = "cosine" if unit else "euclidean"
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


def without_paths(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config without the folders of the machine: paths keep their last part."""

    def shorten(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: shorten(v) for k, v in value.items()}
        return pathlib.PurePath(value).name if isinstance(value, str) and "/" in value else value

    shortened = {name: shorten(config[name]) for name in ("dataset", "net")}
    return {**config, **shortened}


def write_proof(
    folder: pathlib.Path,
    manifest: files.Manifest,
    preprocess: preprocessing.Preprocessing,
    embed_fn: Callable[[np.ndarray], np.ndarray],
    images: np.ndarray,
    labels: np.ndarray | None = None,
    *,
    onnx: bool,
) -> files.Manifest:
    """Writes the ONNX program if wanted, and the parity reports of all programs on `images`.

    Without `labels`, all images belong to one class.
    """
    if onnx:
        models.write_onnx(folder)
        manifest = files.write_manifest(folder, manifest)
    net = loading.Bundle(folder, manifest, preprocess, embed_fn, manifest.batch_sizes[-1:])
    reference = net.embed_prepared(images)
    labels = np.zeros(len(images), np.int32) if labels is None else labels
    reports = check_programs(folder, manifest, reference, images, labels)
    return files.write_manifest(folder, dataclasses.replace(manifest, parity=reports))


def check_programs(
    folder: pathlib.Path,
    manifest: files.Manifest,
    reference: np.ndarray,
    images: np.ndarray,
    labels: np.ndarray,
) -> dict[str, Any]:
    """Returns the parity reports of all programs in `folder`."""
    limits = loading.limits(manifest.output.precision, programs.platform())
    reports: dict[str, Any] = {"platform": programs.platform(), "programs": {}}
    for program in loading.PROGRAMS:
        if program == "onnx" and files.ONNX not in manifest.files:
            continue
        outputs = parity.run_program(folder, images, program, largest=manifest.batch_sizes[-1])
        try:
            reports["programs"][program] = parity.compare(reference, outputs, labels, limits=limits)
        except parity.MismatchedProgram as error:
            raise parity.MismatchedProgram(f"{program}: {error}; no bundle is written") from None
    return reports
