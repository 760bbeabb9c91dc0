"""The page of a run: `report.html` in its folder."""

import functools
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging

from dmljax.data.records import Reader
from dmljax.data.splits import Split, images_of, record_name, subset
from dmljax.methods.base import Inspect
from dmljax.report import facts, inside, page
from dmljax.report import run as run_facts
from dmljax.runs import folder as run_folder
from dmljax.runs import frozen
from dmljax.runs.folder import Embedded
from dmljax.train import optimizers
from dmljax.train.evaluation import MAIN, Evaluator
from dmljax.train.run import Run

# The page looks for copies of test images among this many training images. At the end of a run it
# embeds no more images than the run has trained on in a twentieth of its steps. A forward pass
# takes a third of a step, so this adds about 2 % to the time of the run.
_MOST_TRAINING, _TRAINED_DIVISOR = 20_000, 20


def write(embedded: Embedded) -> bool:
    """Writes the page of a run, and returns whether it was written.

    An error is logged as a warning, and the run continues.
    """
    most = min(_MOST_TRAINING, embedded.run.steps * embedded.run.batch_size // _TRAINED_DIVISOR)
    try:
        page.write(_facts(embedded, most=most), embedded.workdir / page.FILE)
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
    embedded = Embedded(run, state, workdir, evaluator, embeddings, scores)
    return _facts(embedded, most=_MOST_TRAINING, pictures=pictures)


def _facts(embedded: Embedded, *, most: int, pictures: bool = True) -> facts.Facts:
    """Returns the facts of a run; `most` training images are searched for copies of test images."""
    run, test, step = embedded.run, embedded.run.test, int(embedded.state.step)
    files, reader = run_facts.read(embedded.workdir), _reader(run, test)
    result, score = files.result, run_folder.describe_score(run, embedded.state)
    rows = result.against_frozen if result and result.chosen and result.chosen.step == step else ()
    against = frozen.sentence([frozen.Against(**row) for row in rows])
    return facts.make(
        embedded.embeddings[MAIN],
        test,
        title=files.name,
        files=short_names(test),
        read_fn=lambda item: reader(int(item)),
        scores=files.scores_at(step) or None,
        query_scores=embedded.scores,
        average=run.options.evaluate.average,
        are_classes_new=not set(test.names) & set(run.train.names),
        inside_fn=functools.partial(_views, embedded) if run.method.inspect else None,
        training_fn=functools.partial(_training, embedded, most),
        fields={
            "rule": ". ".join(filter(None, (score, against))),
            "curves": files.curves(step, run.reload_steps, shown=run.selection.score),
            "prefixes": files.prefixes(step, embedded.embeddings[MAIN].shape[1]),
            "run": files.provenance(),
            "warning": files.warning(),
        },
        seed=run.options.seed,
        pictures=pictures,
        devices=run.shards.mesh.local_devices,
    )


def _reader(run: Run, split: Split) -> Reader:
    return Reader(images_of(split), least_side=run.eval_transform_fn.least_side)


def _training(embedded: Embedded, most: int) -> dict[str, Any] | None:
    """Embeds at most `most` training images; None for 0 images or several processes."""
    if not most or jax.process_count() > 1:  # this process alone makes the page
        return None
    train, rows = embedded.run.train, np.arange(len(embedded.run.train))
    if len(rows) > most:
        rows = np.sort(np.random.default_rng(0).choice(len(rows), most, replace=False))
    split = subset(train, rows)
    embeddings = embedded.evaluator.embeddings(embedded.state, split)[MAIN]
    is_readable = np.isfinite(embeddings).all(axis=1)
    split = subset(split, is_readable)
    return {
        "embeddings": embeddings[is_readable],
        "labels": split.labels,
        "names": split.names,
        "read_fn": _reader(embedded.run, split),
        "total": len(train),
    }


def short_names(split: Split) -> list[str] | None:
    """Returns the last two parts of each image's path; None for images without names."""
    if not len(split) or isinstance(split.records, np.ndarray):
        return None
    names = [record_name(split.records, i) for i in range(len(split))]
    if all(name == f"record {i}" for i, name in enumerate(names)):
        return None
    return ["/".join(pathlib.PurePath(name).parts[-2:]) for name in names]


def _views(embedded: Embedded, readable: np.ndarray) -> list[dict[str, Any]]:
    """Returns views of the inside of the method, for a few readable test images."""
    run, rng = embedded.run, np.random.default_rng(0)
    reader = Reader(run.test, least_side=run.eval_transform_fn.least_side)
    params = optimizers.averaged(embedded.state.params, embedded.state.opt_state)
    # This process alone draws, on one device.
    arrays = jax.device_get((params, embedded.state.model_state))

    def bound(kind: str, inspect_fn: Callable) -> Callable:
        options = {"key": jax.random.key(run.options.seed)} if kind == "synthetic_features" else {}

        def call(images):
            images = run.normalize_fn(jax.numpy.asarray(images))
            return jax.device_get(jax.jit(inspect_fn)(*arrays, images, **options))

        return call

    functions = {k: fn for k, fn in (run.method.inspect or Inspect())._asdict().items() if fn}
    return inside.views(
        labels=run.test.labels,
        parts={name: x for name, x in embedded.embeddings.items() if name != MAIN},
        inspect_fns={kind: bound(kind, fn) for kind, fn in functions.items()},
        read_fn=lambda rows: np.stack([run.eval_transform_fn(reader(int(i)), rng) for i in rows]),
        rows=readable,
    )
