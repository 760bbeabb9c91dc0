"""Ensembles of trained nets: their embeddings concatenated, scored once on the test split."""

import dataclasses
import pathlib
import time
from collections.abc import Sequence

import numpy as np

from dmljax.files import run_folder as results
from dmljax.runs import folder as run_folder
from dmljax.train.evaluation import MAIN, Evaluator


def write(workdir: pathlib.Path, members: Sequence[pathlib.Path], words: Sequence[str]) -> None:
    """Writes the result of an ensemble of finished runs on their common test split.

    The concatenated unit vectors rank by the mean of the nets' squared distances. Scores named
    "mean_distance/R@1" and so on rank by the mean of the distances.
    """
    start, blocks = time.monotonic(), []
    for member in members:
        run, state = run_folder.reopen(member, overrides=words)
        evaluator = Evaluator(run)
        block = evaluator.embeddings(state, run.test)[MAIN]
        lengths = np.linalg.norm(block, axis=1, keepdims=True)
        blocks.append(block / np.maximum(lengths, 1e-12))
    joined = np.concatenate(blocks, axis=1) / np.float32(len(blocks)) ** 0.5
    scores = evaluator.main_scores(joined, run.test)
    if run.test.groups is None:  # the ranking by mean distances cannot leave out groups
        parts = {str(i): block for i, block in enumerate(blocks)}
        scores |= evaluator.mean_distance_scores(parts, run.test)
    first = results.read(members[0])
    results.write(
        workdir,
        dataclasses.replace(
            first,
            scores={f"test/{name}": value for name, value in scores.items()},
            evaluations=(),
            against_frozen=(),
            digests={**first.digests, "run": workdir.name},
            wall_seconds=time.monotonic() - start,
        ),
    )
