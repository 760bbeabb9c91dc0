"""The page of a run: `report.html` in its folder."""

import functools
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging

from dmljax.data.records import Reader
from dmljax.data.splits import Split, images_of, record_name, subset
from dmljax.methods.base import Inspect
from dmljax.report import facts, inside, page
from dmljax.report import run as run_facts
from dmljax.report.scores_file import QueryScores
from dmljax.runs import folder as run_folder
from dmljax.runs import frozen
from dmljax.train import optimizers
from dmljax.train.evaluation import MAIN, Evaluation, Evaluator
from dmljax.train.run import Run
from dmljax.train.step import TrainState

# The page looks for copies of test images among this many training images. At the end of a run it
# embeds no more images than the run has trained on in a twentieth of its steps. A forward pass
# takes a third of a step, so this adds about 2 % to the time of the run.
_MOST_TRAINING, _TRAINED_DIVISOR = 20_000, 20


def write(
    run: Run,
    state: TrainState,
    evaluation: Evaluation,
    workdir: pathlib.Path,
    scores: QueryScores,
    *,
    evaluator: Evaluator,
) -> bool:
    """Writes the page of an evaluation, and returns whether it was written.

    An error is logged as a warning, and the run continues.
    """
    assert evaluation.test_embeddings is not None
    most = min(_MOST_TRAINING, run.steps * run.batch_size // _TRAINED_DIVISOR)
    try:
        training_fn = functools.partial(_training, run, state, evaluator, most=most)
        content = _facts(run, state, evaluation.test_embeddings, workdir, scores, training_fn)
        page.write(content, workdir / page.FILE)
    except Exception as error:
        logging.warning("%s was not written: %s: %s", page.FILE, type(error).__name__, error)
        return False
    return True


def write_again(
    workdir: str | os.PathLike, *, step: int | None = None, overrides: Sequence[str] = ()
) -> pathlib.Path:
    """Embeds the test split of a run again, and writes its page."""
    content = facts_again(workdir, step=step, overrides=overrides)
    return page.write(content, pathlib.Path(workdir) / page.FILE)


def facts_again(
    workdir: str | os.PathLike,
    *,
    step: int | None = None,
    overrides: Sequence[str] = (),
    pictures: bool = True,
) -> facts.Facts:
    """Embeds the test split of a run again, and returns the facts of its page.

    Without `step`, the scores of the queries are also written to `scores.safetensors`. Other data
    than the data of the training are refused, because page and scores name those.
    """
    workdir = pathlib.Path(workdir)
    run, state = run_folder.reopen(workdir, step=step, overrides=overrides)
    run_folder.check_data(run, workdir)
    if not len(run.test):
        raise ValueError(f"{workdir} has no test images to report on")
    evaluator = Evaluator(run)
    embeddings = evaluator.embeddings(state, run.test)
    scores = run_folder.query_scores(run, embeddings[MAIN], workdir, step=int(state.step))
    if step is None:
        run_folder.write_scores(scores, workdir)
    training_fn = functools.partial(_training, run, state, evaluator, most=_MOST_TRAINING)
    return _facts(run, state, embeddings, workdir, scores, training_fn, pictures=pictures)


def _facts(
    run: Run,
    state: TrainState,
    embeddings: Mapping[str, np.ndarray],
    workdir: pathlib.Path,
    query_scores: QueryScores,
    training_fn: Callable[[], Mapping[str, Any] | None],
    *,
    pictures: bool = True,
) -> facts.Facts:
    """Returns the facts of a run at the state `state`; `embeddings` are those of the test split."""
    test, step, files = run.test, int(state.step), run_facts.read(workdir)
    least_side = run.eval_transform_fn.least_side
    reader = Reader(images_of(test), cache=False, least_side=least_side)
    result = files.result
    rows = result.against_frozen if result and result.chosen and result.chosen.step == step else ()
    against = frozen.sentence([frozen.Against(**row) for row in rows])
    return facts.make(
        embeddings[MAIN],
        test,
        title=files.name,
        files=short_names(test),
        read_fn=lambda item: reader(int(item)),
        scores=files.scores_at(step) or None,
        query_scores=query_scores,
        average=run.options.evaluate.average,
        are_classes_new=not set(test.names) & set(run.train.names),
        inside_fn=functools.partial(_views, run, state, embeddings) if run.method.inspect else None,
        training_fn=training_fn,
        fields={
            "rule": ". ".join(filter(None, (run_folder.describe_score(run, state), against))),
            "curves": files.curves(step, run.reload_steps, shown=run.selection.score),
            "prefixes": files.prefixes(step, embeddings[MAIN].shape[1]),
            "run": files.provenance(),
            "warning": files.warning(),
        },
        seed=run.options.seed,
        pictures=pictures,
        devices=run.shards.mesh.local_devices,
    )


def _training(
    run: Run, state: TrainState, evaluator: Evaluator, *, most: int
) -> dict[str, Any] | None:
    """Embeds at most `most` training images; None for 0 images or several processes."""
    if not most or jax.process_count() > 1:  # this process alone makes the page
        return None
    rows = np.arange(len(run.train))
    if len(rows) > most:
        rows = np.sort(np.random.default_rng(0).choice(len(rows), most, replace=False))
    split, least_side = subset(run.train, rows), run.eval_transform_fn.least_side
    embeddings = evaluator.embeddings(state, split)[MAIN]
    is_readable = np.isfinite(embeddings).all(axis=1)
    if not is_readable.all():
        split, embeddings = subset(split, is_readable), embeddings[is_readable]
    return {
        "embeddings": embeddings,
        "labels": split.labels,
        "names": split.names,
        "read_fn": Reader(images_of(split), cache=False, least_side=least_side),
        "total": len(run.train),
    }


def short_names(split: Split) -> list[str] | None:
    """Returns the last two parts of each image's path; None for images without names."""
    if not len(split) or isinstance(split.records, np.ndarray):
        return None
    names = [record_name(split.records, i) for i in range(len(split))]
    if all(name == f"record {i}" for i, name in enumerate(names)):
        return None
    return ["/".join(pathlib.PurePath(name).parts[-2:]) for name in names]


def _views(
    run: Run, state: TrainState, embeddings: Mapping[str, np.ndarray], readable: np.ndarray
) -> list[dict[str, Any]]:
    """Returns views of the inside of the method, for a few readable test images."""
    reader = Reader(run.test, least_side=run.eval_transform_fn.least_side)
    rng = np.random.default_rng(0)
    # This process alone draws, on one device.
    params, model_state = jax.device_get(
        (optimizers.averaged(state.params, state.opt_state), state.model_state)
    )

    def images_of_rows(rows: np.ndarray) -> np.ndarray:
        return np.stack([run.eval_transform_fn(reader(int(row)), rng) for row in rows])

    def bound(kind: str, inspect_fn: Callable) -> Callable:
        options = {"key": jax.random.key(run.options.seed)} if kind == "synthetic_features" else {}

        def call(images):
            images = run.normalize_fn(jax.numpy.asarray(images))
            return jax.device_get(jax.jit(inspect_fn)(params, model_state, images, **options))

        return call

    functions = {k: fn for k, fn in (run.method.inspect or Inspect())._asdict().items() if fn}
    return inside.views(
        labels=run.test.labels,
        parts={name: x for name, x in embeddings.items() if name != MAIN},
        inspect_fns={kind: bound(kind, fn) for kind, fn in functions.items()},
        read_fn=images_of_rows,
        rows=readable,
    )
