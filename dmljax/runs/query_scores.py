"""The scores of a run's test queries, written beside its other results."""

from __future__ import annotations

import json
import os
import pathlib

import numpy as np
from absl import logging

from dmljax.report import scores_file
from dmljax.report.scores_file import QueryScores
from dmljax.train.run import Run

__all__ = ["of_run", "write"]


def of_run(
    run: Run, embeddings: np.ndarray, workdir: str | os.PathLike, *, step: int
) -> QueryScores:
    """The scores of every test query by the embeddings of a step."""
    digests = pathlib.Path(workdir) / "digests.json"
    data = json.loads(digests.read_text())["data"] if digests.exists() else ""
    return scores_file.score(
        embeddings, run.test, data=data, step=step, devices=run.shards.mesh.local_devices
    )


def write(scores: QueryScores, workdir: str | os.PathLike) -> None:
    """Writes the scores into the folder of the run. A fault costs the file, never the run."""
    try:
        scores_file.write(workdir, scores)
    except OSError as error:
        logging.warning("%s was not written: %s", scores_file.FILE, error)
