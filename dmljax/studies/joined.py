"""Embeddings of all folds side by side: one embedding of k nets, scored once on the test split.

A process of its own embeds, since a worker holds no device: `dmljax study join OUT.json RUN RUN`.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from dmljax.files import reading
from dmljax.files.writing import write_json
from dmljax.studies import outcomes

__all__ = ["make_all", "read", "write"]


def write(out: str, folders: Sequence[pathlib.Path], words: Sequence[str] = ()) -> None:
    """Writes the scores of the joined unit vectors of finished runs on their common test split."""
    import numpy as np

    from dmljax.runs import folder as run_folder
    from dmljax.train import evaluation

    blocks = []
    for folder in folders:
        run, state = run_folder.reopen(folder, overrides=words)
        block = evaluation.Evaluator(run).embeddings(state, run.test)[evaluation.MAIN]
        lengths = np.linalg.norm(block, axis=1, keepdims=True)
        blocks.append(block / np.maximum(lengths, 1e-12))
    joined = np.concatenate(blocks, axis=1) / np.float32(len(blocks)) ** 0.5
    options = run.evaluation
    scores = evaluation.score(
        joined,
        run.test,
        ks=options.ks,
        ranking_fns=options.ranking_fns,
        clustering_fns=options.clustering_fns,
        embedding_fns=options.embedding_fns,
        seeds=options.seeds,
        starts=options.starts,
        depth=options.depth,
    )
    write_json(out, {"runs": [folder.name for folder in folders], "scores": scores}, indent=1)


def _file(session: Any, row: str, seed: int, digests: Sequence[str]) -> pathlib.Path:
    """Where the scores of a row and a seed are; another set of runs has another file."""
    name = f"{'-'.join(digest[:6] for digest in digests)}-seed{seed}.json"
    return session.folder.path / "joined" / name


def _groups(session: Any) -> list[tuple[str, int, list[str]]]:
    """Rows and seeds whose folds are to be joined, with the digests of their runs."""
    rows = {row.runs_of for row in session.study.rows if row.join_folds}
    groups: dict[tuple[str, int], list[str]] = {}
    for run in session.folder.planned():
        if run.row in rows:
            groups.setdefault((run.row, run.seed), []).append(run.digest)
    folds = session.study.folds
    # Runs that start from others are planned late: fewer folds are another embedding.
    return [(*key, digests) for key, digests in groups.items() if len(digests) == folds]


def read(session: Any) -> dict[tuple[str, int], Mapping[str, float]]:
    """The scores of joined embeddings by row and seed, where they exist."""
    existing = {}
    for row, seed, digests in _groups(session):
        path = _file(session, row, seed, digests)
        if path.exists():
            existing[row, seed] = json.loads(path.read_text())["scores"]
    return existing


def make_all(session: Any, worker: Any) -> int:
    """Scores all joined embeddings whose runs are finished; how many could not be made."""
    failed = 0
    for row, seed, digests in _groups(session):
        worker.check_signal()
        path = _file(session, row, seed, digests)
        folders = [session.folder.run_folder(digest) for digest in digests]
        if any(outcomes.outcome(folder).state != "finished" for folder in folders):
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        with outcomes.locked(path.parent, name=f"{path.stem}.lock") as lock:
            if lock is None or path.exists():
                continue
            words = [sys.executable, "-m", "dmljax.main", "study", "join", path, *folders]
            words += [*session.words, *reading.trust_words()]
            done = subprocess.run(
                list(map(str, words)), env=worker.environment, capture_output=True, text=True
            )
        if done.returncode:
            message = (done.stderr.strip().splitlines() or ["no message"])[-1]
            worker.say(f"{row}, seed {seed}: its folds cannot be joined: {message}")
            failed += 1
        else:
            worker.say(f"{row}, seed {seed}: {len(folders)} folds joined")
    return failed
