"""What a run reports: its header, its footer and its pictures."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable

import jax
import numpy as np

from dmljax import kernels
from dmljax.data.reader import Reader
from dmljax.data.splits import Split
from dmljax.report import inside, pictures
from dmljax.train import initial_state, optimizers
from dmljax.train.evaluation import MAIN, Evaluation
from dmljax.train.journal import read, table
from dmljax.train.run import Run
from dmljax.train.run_folder import describe_score
from dmljax.train.step import TrainState

__all__ = ["footer", "frame", "header"]


def header(run: Run, state: TrainState) -> list[str]:
    """The data, the net, the batches and the devices of a run, in a line or two."""
    parameters = sum(x.size for x in jax.tree.leaves(state.params))
    platform = jax.devices()[0].platform
    devices = f"{run.shards.size} {platform} device{'s' if run.shards.size > 1 else ''}"
    convolutions = kernels.describe(getattr(run.net, "impl", "auto"), platform)
    splits = [f"{len(run.train):,} training images of {len(run.train.names):,} classes"]
    if run.held_out is not None:
        splits.append(_held_out(run, run.held_out))
    splits.append(f"{len(run.test):,} test images of {len(run.test.names):,} classes")
    line = (
        f"{run.dataset}: {', '.join(splits)}; {parameters:,} parameters, "
        f"pretraining: {run.weights or 'none'}; "
        f"batches of {run.batch_size} on {devices}; {convolutions}"
    )
    if run.sampler_note:
        line += f"; {run.sampler_note}"
    if start_step := int(state.step):
        return [f"{line}; going on from step {start_step}"]
    hint = None if run.weights else initial_state.missing_weights_note(run.net_name)
    return [line, hint] if hint else [line]


def _held_out(run: Run, split: Split) -> str:
    """The held-out classes, and whether they choose the checkpoint."""
    text = f"{len(split):,} images of {len(split.names):,} held-out classes"
    if run.selection.is_last or run.selection.split != "val":
        return text
    return f"{text} (their {run.selection.score} chooses the checkpoint)"


def footer(run: Run, state: TrainState, evaluation: Evaluation, workdir: pathlib.Path) -> list[str]:
    """The table of scores, why this step was chosen, and the pictures, which this draws."""
    lines = ["", table(evaluation.test_scores), f"test split {describe_score(run, state)}"]
    lines += _choice(run, int(state.step), read(workdir / "metrics.jsonl"))
    if run.pictures and evaluation.test_embeddings is not None:
        names = _draw(run, state, evaluation.test_embeddings, workdir)
        lines.append(f"pictures: {workdir}/{', '.join(names)}")
    return lines


def _choice(run: Run, chosen: int, rows: list[dict]) -> list[str]:
    """Which step was chosen and why; nothing if the last step is chosen and no other is better."""
    key = run.selection.key
    scores = {row["step"]: row[key] for row in rows if key in row and row["step"]}
    if len(scores) < 2:
        return []
    best = max(scores, key=lambda step: (scores[step], -step))
    last = max(scores)
    if not run.selection.is_last:
        return [
            f"step {chosen} was chosen by {key}: {100 * scores[best]:.1f} is the highest of "
            f"{len(scores)} evaluations (step {last}: {100 * scores[last]:.1f})"
        ]
    if scores[best] <= scores[last]:
        return []
    return [
        f"the last step was chosen (select=last), but {key} was higher at step {best}: "
        f"{100 * scores[best]:.1f}, now {100 * scores[last]:.1f}. To choose the step on held-out "
        "classes: --config.validation=0.2 --config.select=val"
    ]


def frame(run: Run, embeddings: dict[str, np.ndarray], workdir: pathlib.Path, step: int) -> None:
    """Draws the embeddings of the test split after a step, for the movie."""
    if jax.process_index() == 0:
        folder = workdir / "frames"
        folder.mkdir(exist_ok=True)
        path = folder / f"{step:09d}.png"
        pictures.frame(embeddings[MAIN], run.test, path, title=f"step {step:,}")


def _draw(
    run: Run, state: TrainState, embeddings: dict[str, np.ndarray], workdir: pathlib.Path
) -> list[str]:
    """Draws all pictures into the run folder, and returns their names."""
    read_image, rng = Reader(run.test, cache=False), np.random.default_rng(0)

    def image_fn(row):
        return run.eval_transform_fn(read_image(int(row)), rng)

    main = embeddings[MAIN]
    pictures.curves(read(workdir / "metrics.jsonl"), workdir / "curves.png")
    pictures.neighbors(main, run.test, image_fn, workdir / "retrieval.png")
    pictures.embedding_map(main, run.test, image_fn, workdir / "map.png")
    names = ["curves.png", "retrieval.png", "map.png"]
    if run.evaluation.frames:
        pictures.movie(workdir / "frames", workdir / "movie.gif")
        names.append("movie.gif")
    if run.method.inspect is not None:
        readable = np.flatnonzero(np.isfinite(main).all(axis=1))
        names += inside.draw(
            workdir,
            labels=run.test.labels[readable],
            parts={name: x[readable] for name, x in embeddings.items() if name != MAIN},
            inspect_fns=_inspect_fns(run, state),
            read_fn=lambda rows: np.stack([image_fn(readable[row]) for row in rows]),
        )
    return names


def _inspect_fns(run: Run, state: TrainState) -> dict[str, Callable]:
    """The functions of `Inspect` that a method has, as functions of uint8 images."""
    # This process alone draws, on one device.
    params, model_state = jax.device_get(
        (optimizers.averaged(state.params, state.opt_state), state.model_state)
    )

    def bound(inspect_fn: Callable) -> Callable:
        def call(images):
            images = run.normalize_fn(jax.numpy.asarray(images))
            return jax.device_get(jax.jit(inspect_fn)(params, model_state, images))

        return call

    functions = {kind: fn for kind, fn in run.method.inspect._asdict().items() if fn is not None}
    if "synthetic_features" in functions:
        functions["synthetic_features"] = functools.partial(
            functions["synthetic_features"], key=jax.random.key(run.seed)
        )
    return {kind: bound(function) for kind, function in functions.items()}
