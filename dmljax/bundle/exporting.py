"""A run becomes a bundle, if its programs compute what its checkpoint computes."""

import contextlib
import datetime
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save as save_tensors

import dmljax
from dmljax.bundle import (
    card,
    compression,
    figures,
    files,
    golden,
    loading,
    onnx_program,
    parity,
    preprocessing,
    programs,
)
from dmljax.config.fields import named
from dmljax.data.records import Reader
from dmljax.data.splits import Split, images_of, subset
from dmljax.files import locks, reading
from dmljax.files import result as results
from dmljax.files.result import Result
from dmljax.files.writing import make_folder, sync, write_json
from dmljax.metrics.significance import FEWEST_CLASSES
from dmljax.runs import frozen
from dmljax.runs.folder import embedding, reopen
from dmljax.train.evaluation import MAIN, Evaluation, Evaluator
from dmljax.train.run import Run
from dmljax.train.step import TrainState

BATCH_SIZES = (1, 4, 16, 32, 64)
_CHECKED_IMAGES = 256
_FITTED_IMAGES = 5_000  # for ranges and thresholds: at most 12.5 million pairs
_COMPARED_IMAGES = 4_000
_MONTHS = 6  # for which JAX promises that newer versions run a program


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
    sizes = checked_sizes(batch_sizes)
    check_target(out, onnx=onnx)
    with _finished(workdir):
        run, state = reopen(workdir, step=step, overrides=overrides, trust_modules=trust_modules)
    preprocess = preprocessing.from_transform(run.config["eval_transform"], run.eval_image_shape)
    if not callable(getattr(run.method, "embed", None)):
        method = named(run.config["method"])["name"]
        raise ValueError(f"the method {method!r} has no function embed: a bundle needs one")
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
    config, variables = programs.at_size(without_paths(run.config), variables, shape)
    model = programs.with_values(programs.model_of(config, shape, classes=classes), variables)
    images, labels = test_images(run, preprocess, limit=_CHECKED_IMAGES)
    with written_whole(out) as folder:
        write_json(folder / files.CONFIG, config, indent=2)
        write_model(folder, model, preprocess, embed_fn)
        facts = {"batch_sizes": list(sizes), "classes": classes, "thresholds": {}}
        if run.method.prefixes:
            facts["prefixes"] = list(run.method.prefixes)
        manifest = write_manifest(folder, model, facts, onnx=onnx)
        net = loading.Bundle(folder, manifest, preprocess, embed_fn, sizes[-1:])
        reference = net.embed_prepared(images)
        reports = check_programs(folder, manifest, reference, images, labels)
        write_json(folder / files.PARITY, reports, indent=2)
        result = results.read_if_any(workdir)
        if result is not None and (result.chosen is None or result.chosen.step != int(state.step)):
            result = None  # of another checkpoint
        evidence = _evidence(
            run,
            state,
            result,
            folder,
            evaluator=evaluator,
            test=test_embeddings[MAIN],
            against=against,
            unit=manifest["output"]["unit"],
        )
        facts["thresholds"] = evidence.thresholds
        manifest = write_manifest(folder, model, facts)
        markdown = card.text(
            run,
            manifest,
            reports,
            preprocess.to_json(),
            evidence,
            result=result,
            license=license,
        )
        (folder / files.CARD).write_text(markdown)
        write_manifest(folder, model, facts)
    return out


def checked_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """The batch sizes of a bundle in their order; raises if one is no positive number."""
    if not sizes or min(sizes) < 1:
        raise ValueError(f"batch sizes must be positive, not {list(sizes)}")
    return tuple(sorted(set(sizes)))


def check_target(out: pathlib.Path, *, onnx: bool) -> None:
    """Raises unless `out` does not exist or is an empty folder, and `onnx` programs can be made."""
    if onnx:
        onnx_program.check_installed()
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
    """A new folder beside `out`, which is renamed to `out` when the block ends without an error."""
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


def test_images(
    run: Run, preprocess: preprocessing.Preprocessing, *, limit: int
) -> tuple[np.ndarray, np.ndarray]:
    """Inputs `uint8 [n h w c]` and labels of test images: whole classes, in a random order."""
    split = run.test
    read = Reader(images_of(split), cache=False, least_side=preprocess.least_side)
    rng, images, labels = np.random.default_rng(0), [], []
    for row in _rows_by_class(split, rng):
        if len(images) == limit:
            break
        try:
            images.append(preprocess(read(int(row))))
            labels.append(split.labels[row])
        except ValueError:
            if run.options.unreadable != "skip":
                raise
    if not images:
        raise ValueError("the test split has no readable image to compare the programs on")
    return np.stack(images), np.array(labels)


def _evidence(
    run: Run,
    state: TrainState,
    result: Result | None,
    folder: pathlib.Path,
    *,
    evaluator: Evaluator,
    test: np.ndarray,
    against: Sequence[frozen.Against],
    unit: bool,
) -> card.Evidence:
    """Measures the figures of the card; also writes `compression.safetensors`."""
    selection = f"Checkpoint of step {int(state.step)} of {run.steps}"
    uses_test = False
    if result is not None and result.chosen is not None:
        selection, uses_test = result.chosen.sentence, result.chosen.uses_test
        selection = selection[0].upper() + selection[1:]
    average = run.options.evaluate.average
    scores = figures.scores(test, run.test, average=average)
    prefixes = figures.by_prefix(test, run.test, run.method.prefixes, average=average)
    evidence = card.Evidence(
        scores=scores,
        against=against,
        selection=selection,
        uses_test=uses_test,
        thresholds={},
        compression={},
        compression_images=0,
        fitted_on="",
        prefixes={**prefixes, test.shape[1]: scores} if run.method.prefixes else {},
    )
    if not unit:
        return evidence

    def sample(
        split: Split, limit: int, embeddings: np.ndarray | None = None, *, most: int | None = None
    ) -> figures.Labeled:
        """At most `limit` images, class by class, without images that cannot be read.

        Of each class all, or the first `most`.
        """
        rows = _rows_by_class(split, np.random.default_rng(0))
        starts = np.flatnonzero(np.diff(split.labels[rows], prepend=-1))  # of classes
        within = np.arange(len(rows)) - np.repeat(starts, np.diff(starts, append=len(rows)))
        rows = np.sort(rows[within < (most or limit)][:limit])
        if embeddings is None:
            embeddings = evaluator.embeddings(state, subset(split, rows))[MAIN]
        else:
            embeddings = embeddings[rows]
        readable = np.isfinite(embeddings).all(axis=1)
        return figures.Labeled(embeddings[readable], split.labels[rows][readable])

    train = sample(run.train, _FITTED_IMAGES)
    # Large classes leave room for others: two halves of 8 classes have them.
    most = _FITTED_IMAGES // (2 * FEWEST_CLASSES)
    measured_on = sample(run.test, _FITTED_IMAGES, test, most=most)
    if run.held_out is not None and len(run.held_out.names) >= FEWEST_CLASSES:
        chosen_on, split_name = sample(run.held_out, _FITTED_IMAGES, most=most), "val"
    else:
        (chosen_on, measured_on), split_name = figures.halves(measured_on), "test"
    fitted = compression.fit(train.embeddings)
    (folder / files.COMPRESSION).write_bytes(save_tensors(fitted))
    compared = sample(run.test, _COMPARED_IMAGES, test)
    return evidence._replace(
        thresholds=figures.thresholds(chosen_on, measured_on, split=split_name),
        compression=figures.compression_table(fitted, compared, run.method.prefixes),
        compression_images=len(compared.labels),
        fitted_on=f"{len(train.labels):,} training images",
    )


def _rows_by_class(split: Split, rng: np.random.Generator) -> np.ndarray:
    order = rng.permutation(len(split.names))
    return np.argsort(order[split.labels], kind="stable")


def write_model(
    folder: pathlib.Path,
    model: programs.Model,
    preprocess: preprocessing.Preprocessing,
    embed_fn: Callable[[np.ndarray], np.ndarray],
) -> None:
    """Writes parameters, program, preprocessing and golden images.

    `embed_fn` gives the embeddings that belong to the golden images.
    """
    (folder / files.PARAMS).write_bytes(save_tensors(_contiguous(model.tensors)))
    programs.write(folder / files.PROGRAM, programs.stablehlo(model))
    write_json(folder / files.PREPROCESS, preprocess.to_json(), indent=2)
    encoded = golden.encoded(preprocess)
    inputs = golden.inputs(encoded, preprocess)
    tensors = {f"encoded_{i}": np.frombuffer(x, np.uint8) for i, x in enumerate(encoded)}
    tensors |= {"inputs": inputs, "embeddings": embed_fn(inputs)}
    (folder / files.GOLDEN).write_bytes(save_tensors(tensors))
    for name in (files.PARITY, files.CARD):  # until they are known
        (folder / name).write_text("{}\n")


def _contiguous(tensors: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {path: np.ascontiguousarray(x) for path, x in tensors.items()}


def without_paths(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without the folders of the machine: paths keep their last part."""

    def shorten(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: shorten(v) for k, v in value.items()}
        return pathlib.PurePath(value).name if isinstance(value, str) and "/" in value else value

    shortened = {name: shorten(config[name]) for name in ("dataset", "net")}
    return {**config, **shortened}


def write_manifest(
    folder: pathlib.Path,
    model: programs.Model,
    facts: Mapping[str, Any],
    *,
    onnx: bool = False,
    exported_on: str | None = None,
) -> dict[str, Any]:
    """Writes the manifest of the files that are in `folder`, and returns it.

    `facts` are the fields that no file tells: batch_sizes, classes and thresholds. `exported_on` is
    the platform that made the stored embeddings, by default this one. With `onnx`, it also writes
    the ONNX program, which is made from the bundle as it is without.
    """
    tensors = _contiguous(model.tensors)
    config, preprocess = (
        json.loads((folder / name).read_text()) for name in (files.CONFIG, files.PREPROCESS)
    )
    exported = jax.export.deserialize(bytearray((folder / files.PROGRAM).read_bytes()))
    golden_tensors = files.parse_tensors((folder / files.GOLDEN).read_bytes(), files.GOLDEN)
    embeddings = golden_tensors["embeddings"]
    unit = bool(np.allclose(np.linalg.norm(embeddings, axis=1), 1, atol=1e-3))
    today = datetime.datetime.now(datetime.UTC).date()
    manifest = {
        "format": files.FORMAT,
        "model": files.model_digest(tensors, preprocess, config),
        "input": preprocess["input"],
        "output": {
            "dimension": embeddings.shape[1],
            "unit": unit,
            "similarity": "cosine" if unit else "euclidean",
            "precision": _precision(config),
        },
        "program": {
            "platforms": list(exported.platforms),
            "calling_convention": exported.calling_convention_version,
            "jax": jax.__version__,
            "jaxlib": jax.lib.__version__,
            "exported_on": exported_on or loading.platform(),
            "exported": today.isoformat(),
            "promised_until": _months_later(today, _MONTHS).isoformat(),
        },
        **facts,
        "dmljax": dmljax.__version__,
        "files": files.digests(folder),
    }
    manifest = files.sealed(manifest)
    write_json(folder / files.MANIFEST, manifest, indent=2)
    if onnx:
        onnx_program.write(folder)
        return write_manifest(folder, model, facts, exported_on=exported_on)
    return manifest


def _precision(config: Mapping[str, Any]) -> str:
    net, method = (c if isinstance(c, dict) else {} for c in (config["net"], config["method"]))
    return str(net.get("dtype") or method.get("dtype") or "float32")


def _months_later(day: datetime.date, months: int) -> datetime.date:
    years, month = divmod(day.month - 1 + months, 12)
    return datetime.date(day.year + years, month + 1, min(day.day, 28))


def check_programs(
    folder: pathlib.Path,
    manifest: Mapping[str, Any],
    reference: np.ndarray,
    images: np.ndarray,
    labels: np.ndarray | None = None,
) -> dict[str, Any]:
    """The parity reports of all programs in `folder`. Without `labels`, all images are alike."""
    if labels is None:
        labels = np.zeros(len(images), np.int32)
    limits = loading.limits(
        manifest["output"]["precision"], manifest["program"]["exported_on"], loading.platform()
    )
    reports: dict[str, Any] = {"platform": loading.platform(), "programs": {}}
    for program in loading.PROGRAMS:
        if program == "onnx" and not (folder / files.ONNX).exists():
            continue
        outputs = parity.run_program(folder, images, program, largest=manifest["batch_sizes"][-1])
        try:
            reports["programs"][program] = parity.compare(reference, outputs, labels, limits=limits)
        except parity.MismatchedProgram as error:
            raise parity.MismatchedProgram(f"{program}: {error}; no bundle is written") from None
    return reports
