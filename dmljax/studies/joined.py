"""Ensembles of trained nets: their embeddings side by side, scored once on the test split.

The nets are all folds of one seed, or independent nets of several seeds. A worker holds no device,
so another process embeds: `dmljax study join OUT.json RUN RUN`.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dmljax.files import reading
from dmljax.files.writing import make_folder, write_json
from dmljax.studies import outcomes
from dmljax.studies.folder import Session
from dmljax.studies.worker import Worker, run_verb


class _Ensemble(NamedTuple):
    """The nets of a row and a seed, by the digests of their runs."""

    row: str
    seed: int
    digests: tuple[str, ...]

    def file(self, session: Session) -> pathlib.Path:
        """Where its scores are. Another set of nets has another file."""
        name = f"{'-'.join(digest[:6] for digest in self.digests)}-seed{self.seed}.json"
        return session.folder.path / "joined" / name


def write(out: str, folders: Sequence[pathlib.Path], words: Sequence[str] = ()) -> None:
    """Writes the scores of an ensemble of finished runs on their common test split.

    The concatenated unit vectors rank by the mean of the nets' squared distances. Scores named
    "mean_distance/R@1" and so on rank by the mean of the distances.
    """
    import numpy as np

    from dmljax.runs import folder as run_folder
    from dmljax.train import evaluation

    blocks = []
    for folder in folders:
        run, state = run_folder.reopen(folder, overrides=words)
        evaluator = evaluation.Evaluator(run)
        block = evaluator.embeddings(state, run.test)[evaluation.MAIN]
        lengths = np.linalg.norm(block, axis=1, keepdims=True)
        blocks.append(block / np.maximum(lengths, 1e-12))
    joined = np.concatenate(blocks, axis=1) / np.float32(len(blocks)) ** 0.5
    scores = evaluator.main_scores(joined, run.test)
    if run.test.groups is None:  # the ranking by mean distances cannot leave out groups
        parts = {str(i): block for i, block in enumerate(blocks)}
        scores |= evaluator.mean_distance_scores(parts, run.test)
    write_json(out, {"runs": [folder.name for folder in folders], "scores": scores}, indent=1)


def _ensembles(session: Session) -> list[_Ensemble]:
    """The ensembles of all rows whose runs are planned."""
    study, ensembles = session.study, []
    planned: dict[tuple[str, int], list[str]] = {}
    for run in session.folder.planned():
        planned.setdefault((run.row, run.seed), []).append(run.digest)
    for row in study.rows:
        if row.runs_of is None or not row.is_joined:
            continue
        seeds = study.seeds_of(study.row(row.runs_of))
        size = row.join_seeds or 1
        for i, seed in enumerate(study.seeds if row.join_seeds else seeds):
            members = seeds[i * size : (i + 1) * size]
            digests = [d for member in members for d in planned.get((row.runs_of, member), ())]
            # Runs that start from others are planned late: fewer nets are another ensemble.
            if len(digests) == size * (study.folds or 1):
                ensembles.append(_Ensemble(row.name, seed, tuple(digests)))
    return ensembles


def read(session: Session) -> dict[tuple[str, int], Mapping[str, float]]:
    """The test scores of ensembles by row and seed, where they exist."""
    existing: dict[tuple[str, int], Mapping[str, float]] = {}
    for ensemble in _ensembles(session):
        path = ensemble.file(session)
        if path.exists():
            scores = reading.json_file(path)["scores"]
            existing[ensemble.row, ensemble.seed] = {f"test/{k}": v for k, v in scores.items()}
    return existing


def make_all(session: Session, worker: Worker) -> int:
    """Scores all ensembles whose runs are finished; how many could not be scored."""
    failed = 0
    for ensemble in _ensembles(session):
        worker.check_signal()
        path = ensemble.file(session)
        folders = [session.folder.run_folder(digest) for digest in ensemble.digests]
        if any(outcomes.outcome(folder).state != "finished" for folder in folders):
            continue
        make_folder(path.parent)
        with outcomes.locked(path.parent, name=f"{path.stem}.lock") as lock:
            if lock is None or path.exists():
                continue
            words = map(str, ("join", path, *folders))
            message = run_verb(session, *words, environment=worker.environment)
        title = f"{ensemble.row}, seed {ensemble.seed}"
        if message:
            worker.say(f"{title}: its nets cannot be joined: {message}")
            failed += 1
        else:
            worker.say(f"{title}: {len(folders)} nets joined")
    return failed
