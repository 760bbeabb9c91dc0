"""Embeddings of a split, written to files."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Sequence

import numpy as np

from dmljax.data.files import write_json
from dmljax.data.splits import record_name, subset
from dmljax.train.evaluation import MAIN, Evaluator
from dmljax.train.run_folder import reopen, split_of

__all__ = ["export"]


def export(
    workdir: str | os.PathLike,
    out: str | os.PathLike,
    *,
    split: str = "test",
    step: int | None = None,
    dtype: str = "float32",
    chunk: int = 4096,
    overrides: Sequence[str] = (),
) -> pathlib.Path:
    """Writes `embeddings.npy` and `items.safetensors` into the folder `out`, and returns it.

    `items.safetensors` holds the labels, and the masks of query and gallery where the split has
    them; ids and class names are JSON in its metadata. Works through `chunk` images at a time. An
    interrupted export continues with the same call.
    """
    from safetensors.numpy import save_file

    if dtype not in ("float32", "float16"):
        raise ValueError(f"embeddings are written as float32 or float16, not {dtype}")
    run, state = reopen(workdir, step=step, overrides=overrides)
    images, out = split_of(run, split), pathlib.Path(out)
    out.mkdir(parents=True, exist_ok=True)
    task = {"run": str(pathlib.Path(workdir).absolute()), "split": split, "step": int(state.step)}
    task |= {"dtype": dtype, "count": len(images), "overrides": list(overrides)}
    progress_file = out / "progress.json"
    done = 0
    if progress_file.exists():
        progress = json.loads(progress_file.read_text())
        if {k: progress[k] for k in task} != task:
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
    file, array = out / "embeddings.npy", None
    while done < len(images):
        rows = np.arange(done, min(done + chunk, len(images)))
        embeddings = evaluator.embeddings(state, subset(images, rows))[MAIN]
        if array is None:
            shape = (len(images), embeddings.shape[1])
            mode = "r+" if done else "w+"
            array = np.lib.format.open_memmap(file, mode=mode, dtype=dtype, shape=shape)
        array[rows] = embeddings
        array.flush()
        done = int(rows[-1]) + 1
        write_json(progress_file, {**task, "done": done})
    ids = [record_name(images.records, i) for i in range(len(images))]
    metadata = {"ids": json.dumps(ids), "classes": json.dumps(images.names), "run": str(workdir)}
    items = {"labels": images.labels, "query": images.query, "gallery": images.gallery}
    items = {name: array for name, array in items.items() if array is not None}
    save_file(items, out / "items.safetensors", metadata=metadata)
    progress_file.unlink(missing_ok=True)
    print(f"{file}: {len(images):,} embeddings; items.safetensors: their labels and names")
    return out
