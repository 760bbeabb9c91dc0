"""Embeddings of a split, written to files."""

import functools
import json
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from dmljax import vectors
from dmljax.adapt import path_of
from dmljax.data.prepare import MARKS
from dmljax.data.splits import Split, record_name, subset
from dmljax.files import parts, reading
from dmljax.files.writing import atomic_writer, make_folder, tensors_digest, write_json
from dmljax.hints import counted
from dmljax.methods.base import Inspect
from dmljax.runs.folder import reopen, split_of
from dmljax.train import optimizers
from dmljax.train.evaluation import MAIN, Evaluator
from dmljax.train.run import Run
from dmljax.train.step import TrainState


def export(
    workdir: str | os.PathLike,
    out: str | os.PathLike,
    *,
    split: str = "test",
    step: int | None = None,
    dtype: str = "float32",
    chunk: int = 4096,
    synthetic: bool = False,
    prefix: int | None = None,
    shard: parts.Shard | None = None,
    overrides: Sequence[str] = (),
) -> pathlib.Path:
    """Writes `embeddings.npy` and `items.safetensors` into the folder `out`, and returns it.

    `items.safetensors` holds the labels, and query, gallery, groups and superlabels where the split
    has them; ids and class names are JSON in its metadata. `synthetic` adds an array for each of
    the `synthetic_features` of the method, such as `z_invariant.npy` and `reconstruction.npy`, with
    one random sample for each image. `prefix` cuts the embeddings to their first numbers, see
    `Method.prefixes`. Works through `chunk` images at a time. An interrupted export continues with
    the same call.

    With `shard`, only its rows are embedded, into `out/part-I-of-N`; processes with the other
    shards, on this host or others, write their own parts and never wait for each other: see
    `files.parts`. The concatenated parts are bitwise equal to an export without `shard`, on the
    same hardware and batch size.
    """
    if dtype not in ("float32", "float16"):
        raise ValueError(f"embeddings are written as float32 or float16, not {dtype}")
    if shard is not None and synthetic:
        raise ValueError(
            f"--shard={shard} writes embeddings.npy only: random samples of --synthetic depend on "
            "all rows; leave --synthetic out"
        )
    run, state = reopen(workdir, step=step, overrides=overrides)
    if synthetic and (run.method.inspect or Inspect()).synthetic_features is None:
        raise ValueError(
            "--synthetic: the method of this run makes no synthetic features; dvml does, without "
            "baseline=True"
        )
    vectors.check_prefix(prefix, run.method.prefixes, "the run")
    images, out = split_of(run, split), pathlib.Path(out)
    task = {"run": str(pathlib.Path(workdir).absolute()), "split": split, "step": int(state.step)}
    task |= {"dtype": dtype, "count": len(images), "overrides": list(overrides)}
    task |= {"synthetic": True} if synthetic else {}
    task |= {"prefix": prefix} if prefix is not None else {}
    embed_fn = functools.partial(_embed, run, state, images, chunk=chunk, workdir=str(workdir))
    if shard is not None:
        del task["run"]  # hosts may see it under other paths
        task["model"] = _digest(state)
        return _export_part(embed_fn, out, shard, task)
    make_folder(out)
    rows = range(len(images))
    names = embed_fn(out, rows=rows, task=task)
    (out / parts.PROGRESS).unlink(missing_ok=True)
    others = "".join(f", {name}.npy" for name in names if name != "embeddings")
    print(
        f"{out / 'embeddings.npy'}{others}: {_shown_count(out)}; items.safetensors: their labels "
        "and names"
    )
    return out


def _export_part(
    embed_fn: Callable, out: pathlib.Path, shard: parts.Shard, task: dict[str, Any]
) -> pathlib.Path:
    rows = shard.rows(task["count"])
    if shard.count > task["count"]:
        raise ValueError(f"--shard={shard}: there are only {task['count']:,} images")
    with parts.claimed(out, shard, task) as folder:
        if not parts.is_complete(folder):
            embed_fn(folder, rows=rows, task=task)
            parts.finish(folder, rows=rows)
        (folder / parts.PROGRESS).unlink(missing_ok=True)
    finished = len(parts.state(out)["folders"])
    print(f"{folder}: {_shown_count(folder)}; {finished:,} of {shard.count:,} parts are complete")
    return folder


def _shown_count(folder: pathlib.Path) -> str:
    """Formats the count of embeddings in a folder, and of rows without one."""
    is_missing = np.isnan(np.load(folder / "embeddings.npy", mmap_mode="r")[:, 0])
    missing = int(is_missing.sum())
    text = f"{len(is_missing) - missing:,} embeddings"
    return f"{text}, {counted(missing, 'NaN row')} (no readable image)" if missing else text


def _embed(
    run: Run,
    state: TrainState,
    images: Split,
    out: pathlib.Path,
    *,
    rows: range,
    task: dict[str, Any],
    chunk: int,
    workdir: str,
) -> list[str]:
    """Writes the arrays of these rows, continuing an interrupted call; returns their names.

    `progress.json` stays, so that the caller deletes it when everything else is written.
    """
    from safetensors.numpy import save

    progress_file = out / parts.PROGRESS
    done = 0
    if progress_file.exists():
        progress = reading.json_file(progress_file)
        if {k: progress.get(k) for k in task} != task:
            raise ValueError(
                f"{out} holds an unfinished export of {progress}: finish that, or choose another "
                "folder"
            )
        done = progress["done"]
    elif any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty: choose another folder")
    else:
        write_json(progress_file, {**task, "done": 0})
    evaluator = Evaluator(run)
    synthetic = task.get("synthetic", False)
    arrays: dict[str, np.memmap] = {}
    while done < len(rows):
        stop = min(done + chunk, len(rows))
        part = subset(images, np.arange(rows[done], rows[stop - 1] + 1))
        values = {"embeddings": evaluator.embeddings(state, part)[MAIN]}
        if "prefix" in task:
            values["embeddings"] = vectors.prefix(values["embeddings"], task["prefix"])
        if synthetic:
            key = jax.random.fold_in(jax.random.key(run.options.seed), done)
            values |= evaluator.synthetic_features(state, part, key=key)
        for name, value in values.items():
            if name not in arrays:
                shape = (len(rows), value.shape[1])
                mode = "r+" if done else "w+"
                arrays[name] = np.lib.format.open_memmap(
                    out / f"{name}.npy", mode=mode, dtype=task["dtype"], shape=shape
                )
            arrays[name][done:stop] = value
            arrays[name].flush()
        done = stop
        write_json(progress_file, {**task, "done": done})
    # Names of all classes, so that labels of all parts mean the same.
    ids = [record_name(images.records, i) for i in rows]
    metadata = {"ids": json.dumps(ids), "classes": json.dumps(images.names), "run": workdir}
    columns = {name: getattr(images, name) for name in ("labels", *MARKS)}
    selected = slice(rows.start, rows.stop)
    items = {k: np.ascontiguousarray(v[selected]) for k, v in columns.items() if v is not None}
    # `save_file` of safetensors would let nobody else read the file.
    with atomic_writer(out / "items.safetensors", "wb") as file:
        file.write(save(items, metadata=metadata))
    return list(arrays)


def _digest(state: TrainState) -> str:
    """Returns the SHA-256 of the parameters and statistics behind the embedding."""
    params = optimizers.averaged(state.params, state.opt_state)
    leaves = jax.tree_util.tree_leaves_with_path((params, state.model_state))
    return tensors_digest({path_of(path): np.asarray(leaf) for path, leaf in leaves})
