"""Writes files of a run for other programs: embeddings of a split, and LoRA adapters."""

import json
import os
import pathlib
import shutil
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from safetensors.numpy import save

from dmljax import vectors
from dmljax.adapt import trained
from dmljax.adapt.trees import path_of
from dmljax.data.prepare import MARKS
from dmljax.data.splits import Split, record_name, subset
from dmljax.files import parts
from dmljax.files.writing import atomic_writer, tensors_digest, write_array
from dmljax.hints import check_all
from dmljax.methods.base import Inspect
from dmljax.runs import frozen
from dmljax.runs.folder import reopen, split_of
from dmljax.train import optimizers
from dmljax.train.evaluation import MAIN, Evaluator
from dmljax.train.run import Run
from dmljax.train.step import TrainState
from dmljax.weights import write_adapter

_CHUNK = 4096  # images that a repeated call does not embed again
_DTYPES = ("float32", "float16")


class Written(NamedTuple):
    """The folder of written embeddings, their count, and rows of NaN: no readable image."""

    folder: pathlib.Path
    images: int
    unreadable: int
    finished_parts: int


def embeddings(
    workdir: str | os.PathLike,
    out: str | os.PathLike,
    *,
    split: str = "test",
    step: int | None = None,
    dtype: str = "float32",
    synthetic: bool = False,
    prefix: int | None = None,
    shard: parts.Shard | None = None,
    overrides: Sequence[str] = (),
) -> Written:
    """Writes `embeddings.npy` and `items.safetensors` into the folder `out`.

    `items.safetensors` holds the labels, and query, gallery, groups and superlabels where the split
    has them; ids and class names are JSON in its metadata. `synthetic` adds an array for each of
    the `synthetic_features` of the method, such as `z_invariant.npy` and `reconstruction.npy`, with
    one random sample for each image. `prefix` cuts the embeddings to their first numbers, see
    `Method.prefixes`.

    With `shard`, only its rows are embedded, into `out/part-I-of-N`; processes with the other
    shards, on this host or others, write their own parts and never wait for each other: see
    `files.parts`. The concatenated parts are bitwise equal to an export without `shard`, on the
    same hardware and batch size. An interrupted export continues with the same call.
    """
    run, state = reopen(workdir, step=step, overrides=overrides)
    images, out = split_of(run, split), pathlib.Path(out)
    has_none = (run.method.inspect or Inspect()).synthetic_features is None
    check_all(
        {
            f"embeddings are written as float32 or float16, not {dtype}": dtype not in _DTYPES,
            f"--shard={shard} writes embeddings.npy only: random samples of --synthetic depend on "
            "all rows; leave --synthetic out": synthetic and shard is not None,
            "--synthetic: the method of this run makes no synthetic features; dvml does, without "
            "baseline=True": synthetic and has_none,
            f"--shard={shard}: there are only {len(images):,} images": shard is not None
            and shard.count > len(images),
        }
    )
    vectors.check_prefix(prefix, run.method.prefixes, "the run")
    task = {"split": split, "step": int(state.step), "dtype": dtype, "count": len(images)}
    task |= {"overrides": list(overrides), "prefix": prefix, "synthetic": synthetic}
    part = shard or parts.Shard(0, 1)
    with parts.claimed(out, part, {**task, "model": _digest(state)}) as folder:
        if not parts.is_complete(folder):
            rows = part.rows(len(images))
            _write(run, state, images, folder, rows, task, str(workdir))
            parts.finish(folder, rows=rows)
        finished = len(parts.state(out)["folders"])
        if shard is None:  # the only part becomes the folder
            for path in [*folder.glob("*.npy"), *folder.glob("*.safetensors")]:
                path.rename(out / path.name)
            shutil.rmtree(folder)
            for path in [out / parts.TASK, *out.glob("*.lock")]:
                path.unlink()
            folder = out
    is_missing = np.isnan(np.load(folder / "embeddings.npy", mmap_mode="r")[:, 0])
    unreadable = int(is_missing.sum())
    return Written(folder, len(is_missing) - unreadable, unreadable, finished)


def _write(
    run: Run,
    state: TrainState,
    images: Split,
    out: pathlib.Path,
    rows: range,
    task: dict[str, Any],
    source: str,
) -> None:
    """Writes the arrays of these rows; a repeated call embeds only the missing chunks."""
    evaluator, paths = Evaluator(run), list[pathlib.Path]()
    for start in range(rows.start, rows.stop, _CHUNK):
        paths.append(out / f"{start}.chunk")
        if paths[-1].exists():
            continue
        split = subset(images, np.arange(start, min(start + _CHUNK, rows.stop)))
        arrays: dict[str, Any] = {"embeddings": evaluator.embeddings(state, split)[MAIN]}
        if task["prefix"] is not None:
            arrays["embeddings"] = vectors.prefix(arrays["embeddings"], task["prefix"])
        if task["synthetic"]:
            key = jax.random.fold_in(jax.random.key(run.options.seed), start)
            arrays |= evaluator.synthetic_features(state, split, key=key)
        with atomic_writer(paths[-1], "wb") as file:
            np.savez(file, **arrays)
    # Names of all classes, so that labels of all parts mean the same.
    ids = [record_name(images.records, i) for i in rows]
    metadata = {"ids": json.dumps(ids), "classes": json.dumps(images.names), "run": source}
    columns = {name: getattr(images, name) for name in ("labels", *MARKS)}
    items = {k: v[rows.start : rows.stop].copy() for k, v in columns.items() if v is not None}
    # `save_file` of safetensors would let nobody else read the file.
    with atomic_writer(out / "items.safetensors", "wb") as file:
        file.write(save(items, metadata=metadata))
    chunks = [np.load(path) for path in paths]
    for name in chunks[0].files:
        array = np.concatenate([chunk[name] for chunk in chunks])
        write_array(out / f"{name}.npy", array.astype(task["dtype"]))
    for path in paths:
        path.unlink()


def _digest(state: TrainState) -> str:
    """Returns the SHA-256 of the parameters and statistics behind the embedding."""
    params = optimizers.averaged(state.params, state.opt_state)
    leaves = jax.tree_util.tree_leaves_with_path((params, state.model_state))
    return tensors_digest({path_of(path): np.asarray(leaf) for path, leaf in leaves})


def adapter(
    workdir: str | os.PathLike,
    out: str | os.PathLike,
    *,
    step: int | None = None,
    overrides: Sequence[str] = (),
    allow_worse: bool = False,
) -> pathlib.Path:
    """Writes the adapters of a run with trained=lora into the folder `out`, for the package peft.

    The checkpoint is the one that the run's `select` chose, or the one of `step`. A run that is
    worse than its backbone without training is refused unless `allow_worse`: `frozen.check`.
    """
    run, state = reopen(workdir, step=step, overrides=overrides)
    spec = run.options.trained
    is_lora = spec["name"] == trained.lora.__name__ and run.method.backbone == ("net",)
    if run.weights is None or not is_lora:
        raise ValueError(
            f"--adapter: {workdir} must be a run with trained='lora' of a file of weights "
            f"(net.weights), but trained={spec['name']!r} and net.weights={run.weights}: "
            "leave out --adapter for a bundle"
        )
    evaluator = Evaluator(run)
    test = evaluator.embeddings(state, run.test)
    frozen.check(run, state, workdir, test, evaluator, allow_worse=allow_worse)
    options = {name: spec.with_defaults()[name] for name in ("rank", "alpha", "rslora")}
    params = jax.device_get(optimizers.averaged(state.params, state.opt_state))
    write_adapter(out, params["adapters"]["net"], run.net, base=run.weights, **options)
    return pathlib.Path(out)
