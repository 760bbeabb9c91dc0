"""The paths of the files of a run folder, for all code that writes or reads them."""

import os
import pathlib


class RunFolder:
    """The paths in the folder of a run. A new file of a run is one line here.

    `results` lists the paths that a new run in this folder deletes.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = pathlib.Path(path)
        self.results: list[pathlib.Path] = []
        self.config = self.path / "config.json"
        self.digests = self.path / "digests.json"
        self.lock = self.path / "lock"
        # Results of a run.
        self.checkpoints = self._result("checkpoints")
        self.metrics = self._result("metrics.jsonl")
        self.speed = self._result("speed.jsonl")
        self.tensorboard = self._result("tensorboard")
        self.result = self._result("result.json")
        self.scores = self._result("scores.safetensors")
        self.page = self._result("report.html")
        self.frozen = self._result("frozen")  # scores of the backbone without training
        self.frames = self._result("frames")
        self.movie = self._result("movie.gif")
        self.ladder = self._result("ladder.json")
        # Files that a study writes.
        self.study_lock = self.path / "study.lock"
        self.output = self.path / "output.txt"
        self.failure = self.path / "failure.json"

    def _result(self, name: str) -> pathlib.Path:
        path = self.path / name
        self.results.append(path)
        return path

    @property
    def has_results(self) -> bool:
        """Tells whether a run or a ladder has begun; a checkpoint may be damaged."""
        has_checkpoint = any(self.checkpoints.glob("[0-9]*"))
        return has_checkpoint or self.metrics.exists() or self.ladder.exists()
