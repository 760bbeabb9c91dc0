"""What dmljax writes, as programs whose power may be cut, and what must be readable afterwards.

    python tests/power/writers.py NAME FOLDER

Each class is one writer. `write` changes a folder and acknowledges each step when its call has
returned. `problem` opens what a power cut left with the reader of dmljax; it returns None if all
acknowledged steps are there, and no step is there in part.
"""

import os
import pathlib
import sys

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


WRITERS = {kind.__name__: kind for kind in (Results, Index, Checkpoints)}
SLOW = {OneCheckpoint.__name__: OneCheckpoint}

if __name__ == "__main__":
    with open(os.devnull, "w") as sys.stdout:  # only acknowledgements go to the standard output
        (WRITERS | SLOW)[sys.argv[1]]().write(pathlib.Path(sys.argv[2]))
