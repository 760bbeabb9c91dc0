"""What dmljax writes, as programs whose power may be cut, and what must be readable afterwards.

    python tests/power/writers.py NAME FOLDER

Each class is one writer. `write` changes a folder and acknowledges each step when its call has
returned. `problem` opens what a power cut left with the reader of dmljax; it returns None if all
acknowledged steps are there, and no step is there in part.
"""

import contextlib
import io
import os
import pathlib
import sys
from unittest import mock

import numpy as np

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]
for part in ("index", "studies"):
    sys.path.insert(0, str(HERE.parent / part))


def acknowledge() -> None:
    os.write(1, b".")


class Results:
    """Results of a run, one after another."""

    def write(self, root):
        from study_files import finished

        from dmljax.files import run_folder as result
        from dmljax.files.writing import make_folder

        make_folder(root / "runs" / "photos")
        for step in range(1, 5):
            result.write(root / "runs" / "photos", finished({"test/R@1": step / 10}, "ab"))
            acknowledge()

    def problem(self, root, count):
        from dmljax.files import run_folder as result

        try:
            step = round(10 * result.read(root / "runs" / "photos").scores["test/R@1"])
        except FileNotFoundError:
            step = 0
        return None if step in (count, count + 1) else f"result {step} of {count}"


class Index:
    """Random changes of an index, see `kill_index.py`."""

    def __init__(self, steps=9, seed=8):
        import kill_index

        self.kill_index, self.steps = kill_index, [kill_index.Step(seed, 0, None)]
        while len(self.steps) < steps:
            self.steps.append(kill_index.Step(seed, len(self.steps), self.steps[-1].after))

    def write(self, root):
        store = None
        for step in self.steps:
            store = step.run(root / "indexes" / "photos.index", store)
            acknowledge()

    def problem(self, root, count):
        states = [self.steps[0].before, *(step.after for step in self.steps)]
        problems = []
        for state in states[count : count + 2]:
            problems.append(self.kill_index.problem_of(root / "indexes" / "photos.index", state))
        return None if None in problems else problems


class Checkpoints:
    """The journal and the checkpoints of a run that keeps two; `OneCheckpoint` keeps one."""

    keep, steps = 2, 4

    def write(self, root):
        import jax.numpy as jnp

        from dmljax.files.writing import make_folder
        from dmljax.train import checkpoints, journal

        make_folder(root / "runs" / "photos")
        log = journal.Journal(root / "runs" / "photos", step=0, total=self.steps)
        folder = root / "runs" / "photos" / "checkpoints"
        with checkpoints.Checkpoints(folder, keep=self.keep) as saved:
            for step in range(1, self.steps + 1):
                log.evaluation(step, {"R@1": step / 10})
                saved.save(self.state(jnp, step), {"step": step}, score=step / 10)
                saved.wait()
                acknowledge()

    def state(self, np_, step):
        from dmljax.train.step import TrainState

        return TrainState(np_.int32(step), {"w": np_.full(300, step, np_.float32)}, {}, {})

    def problem(self, root, count):
        import jax

        from dmljax.train import checkpoints, journal

        folder = root / "runs" / "photos" / "checkpoints"
        shapes = jax.eval_shape(lambda: self.state(jax.numpy, 0))
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        with checkpoints.Checkpoints(folder, keep=self.keep) as saved:
            restored = saved.restore(shapes, sharding)
            best = saved.best()
        step = 0 if restored is None else restored[1]["step"]
        if step not in (count, count + 1):
            return f"checkpoint {step} of {count}"
        if not step:
            return None
        if best != step:
            return f"best checkpoint {best} of {step}"
        if int(restored[0].step) != step or not np.all(np.asarray(restored[0].params["w"]) == step):
            return f"the content of checkpoint {step}"
        journal._cut(folder.parent / "metrics.jsonl", step, repeats_evaluation=False)
        lines = journal.read(folder.parent / "metrics.jsonl")
        return (
            None
            if lines == [{"step": i + 1, "test/R@1": (i + 1) / 10} for i in range(step)]
            else lines
        )


class OneCheckpoint(Checkpoints):
    keep = 1


class Features:
    """The cached features of two splits; every second image is in both."""

    def __init__(self):
        from dmljax.data.splits import Split

        images = np.random.default_rng(0).integers(0, 255, (30, 4, 4, 3)).astype(np.uint8)
        labels, names = np.arange(30) % 3, tuple("abc")
        parts = slice(20), slice(None, None, 2)
        self.splits = [Split(images[part], labels[part], names) for part in parts]

    def write(self, root):
        for split in self.splits:
            self.compute(root, split)
            acknowledge()

    def compute(self, root, images):
        import jax

        from dmljax.data.features import Cache
        from dmljax.data.transforms.transform import Transform
        from dmljax.train import features
        from dmljax.train.devices import Shardings

        cache = Cache(root / "features", {"net": "mean"}, evaluation=Transform())
        split, shards = cache.split(images), Shardings(jax.devices()[:1])
        means = lambda x: jax.numpy.asarray(x, np.float32).mean(axis=(1, 2))  # noqa: E731
        # A test process also calls this, and goes on with other tests.
        small_files = mock.patch.object(features, "_FILE_ROWS", 4)
        with small_files, contextlib.redirect_stdout(io.StringIO()):
            computed = features.compute(cache, means, title="", shards=shards, batch_size=4)
        return computed, np.stack([split.records[row][0] for row in range(len(split))])

    def problem(self, root, count):
        for i, split in enumerate(self.splits):
            computed, values = self.compute(root, split)
            if i < count and computed:
                return f"{computed} images of split {i} were lost"
            expected = split.records.astype(np.float32).mean(axis=(1, 2))
            if not np.allclose(values, expected, rtol=1e-6):
                return f"other features of split {i}"
        return None


class Studies:
    """The index of a study that grows, and the mark of a failed run."""

    # Runs in the index, whether the run has a folder, and its failure after each step.
    states = (
        (0, False, ""),
        (1, False, ""),
        (3, False, ""),
        (3, True, ""),
        (3, True, "out of memory"),
        (4, True, "out of memory"),
        (4, True, ""),
    )

    def write(self, root):
        from dmljax.files.writing import make_folder
        from dmljax.studies import outcomes
        from dmljax.studies.folder import StudyFolder
        from dmljax.studies.plan import PlannedRun
        from dmljax.studies.study_file import Row, Study

        rows = (Row("plain", "tiny.py", {}),)
        study = Study("small", "small.py", "ab", rows, seeds=(0, 1, 2, 3))
        folder = StudyFolder(root / "studies" / "small", root / "by_digest")
        runs = [PlannedRun("plain", i, None, "tiny.py", (), f"digest{i}") for i in range(4)]
        run = root / "by_digest" / "digest0"
        for step in (
            lambda: folder.record(study, runs[:1]),
            lambda: folder.record(study, runs[1:3]),
            lambda: make_folder(run),
            lambda: outcomes.mark_failed(run, "out of memory", exit_status=1),
            lambda: folder.record(study, runs[3:]),
            lambda: outcomes.forget_failure(run),
        ):
            step()
            acknowledge()

    def problem(self, root, count):
        from dmljax.studies import outcomes
        from dmljax.studies.folder import StudyFolder

        runs = 0
        with contextlib.suppress(FileNotFoundError):
            runs = len(StudyFolder(root / "studies" / "small").planned())
        run = root / "by_digest" / "digest0"
        state = runs, run.is_dir(), outcomes.outcome(run).message
        expected = self.states[count : count + 2]
        return None if state in expected else f"{state}, not one of {expected}"


WRITERS = {kind.__name__: kind for kind in (Results, Index, Checkpoints, Features, Studies)}
SLOW = {OneCheckpoint.__name__: OneCheckpoint}

if __name__ == "__main__":
    with open(os.devnull, "w") as sys.stdout:  # only acknowledgements go to the standard output
        (WRITERS | SLOW)[sys.argv[1]]().write(pathlib.Path(sys.argv[2]))
