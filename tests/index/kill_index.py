"""Kills a process that changes an index, many times, and compares the result with its history.

    python tests/index/kill_index.py FOLDER --kills=200 --seed=0

A child runs steps and reports each one when its call has returned. The parent kills it with SIGKILL
at a random moment, opens the index and compares everything in it with the state after the reported
steps, or after one more: the step in flight happened completely or not at all.
"""

import argparse
import os
import pathlib
import random
import shutil
import signal
import sys
import time

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

from dmljax import index

MODELS = ("aa" * 32, "bb" * 32)
DIMENSION = 16
KINDS = ("add", "add", "add", "replace", "delete", "delete", "compact", "compact", "reopen")
KINDS += ("reindex",)


def vectors_of(numbers):
    """Returns a unit vector for every number."""
    x = np.stack([np.random.default_rng(n).normal(size=DIMENSION) for n in numbers])
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


class Step:
    """Step `i` of the history of `seed`, from the state that the steps before it left."""

    def __init__(self, seed, i, state):
        draw = random.Random(f"{seed}/{i}")
        self.kind = draw.choice(KINDS) if i else "create"
        model, items = state or (0, {})
        items = dict(items)
        self.ids, self.numbers = [], []
        if self.kind == "reindex":
            model = 1 - model
        elif self.kind in ("add", "replace"):
            self.ids = [f"{i}-{j}" for j in range(draw.choice([1, 20, 200]))]
            if self.kind == "replace":
                self.ids += draw.sample(sorted(items), min(len(items), 15))
            self.numbers = [draw.randrange(10**6) for _ in self.ids]
            for name, number in zip(self.ids, self.numbers, strict=True):
                items.pop(name, None)
                items[name] = number
        elif self.kind == "delete":
            self.ids = draw.sample(sorted(items), min(len(items), draw.choice([1, 30, 150])))
            for name in self.ids:
                del items[name]
        self.before, self.after = state, (model, items)

    def run(self, path, store):
        """Does the step; the index to go on with."""
        if self.kind == "create":
            return index.create(path, model=MODELS[0], dimension=DIMENSION)
        if self.kind in ("add", "replace"):
            metadata = [{"number": n} for n in self.numbers]
            store.add(self.ids, vectors_of(self.numbers), metadata, replace=self.kind == "replace")
        elif self.kind == "delete":
            store.delete(self.ids)
        elif self.kind == "compact":
            store.compact()
        else:
            store.close()
            if self.kind == "reindex":
                model, items = self.after
                new = index.reindex(path, model=MODELS[model], dimension=DIMENSION)
                present = [item.id for batch in new.scan() for item in batch]
                missing = [name for name in items if name not in set(present)]
                for start in range(0, len(missing), 50):
                    names = missing[start : start + 50]
                    numbers = [items[name] for name in names]
                    new.add(names, vectors_of(numbers), [{"number": n} for n in numbers])
                assert new.count() == len(items)
                new.switch()
                new.close()
            return index.open(path, write=True)
        return store


def child(path, seed, first, state, pipe):
    """Runs steps until it is killed."""
    store = index.open(path, write=True) if first else None
    for i in range(first, 10**9):
        step = Step(seed, i, state)
        store = step.run(path, store)
        os.write(pipe, b".")
        state = step.after


def problem_of(path, state):
    """Returns how the index at `path` differs from a state; None if it does not."""
    if state is None:
        return "the index exists" if (path / "index.json").exists() else None
    if not (path / "index.json").exists():
        return "the index is missing"
    model, items = state
    with index.open(path) as store:
        if store.model != MODELS[model]:
            return "the other model"
        stored = {item.id: item for batch in store.scan() for item in batch}
        if list(stored) != list(items) and set(stored) != set(items):
            return f"{len(set(stored) ^ set(items))} other ids"
        if items:
            names = list(items)
            vectors = vectors_of([items[name] for name in names])
            for name, vector in zip(names, vectors, strict=True):
                if stored[name].metadata != {"number": items[name]}:
                    return f"other metadata of {name}"
                if not np.array_equal(stored[name].vector, vector):
                    return f"another vector of {name}"
            best = names[int(np.argmax(vectors @ vectors[0]))]
            hit = store.search(vectors[:1], 1)[0][0]
            if not np.isclose(hit.similarity, 1, atol=1e-5):
                return f"a search finds {hit}, not {best}"
        if store.count() != len(items):
            return f"it counts {store.count()} items, not {len(items)}"
        if problems := store.check():
            return f"check: {problems}"
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw = random.Random(args.seed)
    path = args.folder / "photos.index"
    history, first, state = args.seed, 0, None
    steps = 0
    for kill in range(args.kills):
        if kill % 5 == 0:  # a new history, whose creation may be hit
            shutil.rmtree(path, ignore_errors=True)
            history, first, state = history + 1_000_003, 0, None
        reading, writing = os.pipe()
        process = os.fork()
        if process == 0:
            try:
                child(path, history, first, state, writing)
            except BaseException as error:
                print(f"the child failed: {type(error).__name__}: {error}", flush=True)
            os._exit(1)
        os.close(writing)
        # A creation takes some milliseconds; other steps, up to a tenth of a second.
        time.sleep(draw.uniform(0, 0.03 if first == 0 and draw.random() < 0.6 else 0.5))
        os.kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
        assert os.WIFSIGNALED(status), "the child ended by itself"
        count = 0
        while data := os.read(reading, 1 << 16):
            count += len(data)
        os.close(reading)
        for i in range(first, first + count):
            state = Step(history, i, state).after
        first += count
        steps += count
        step = Step(history, first, state)
        problem = problem_of(path, state)
        if problem is not None:
            other = problem_of(path, step.after)
            assert other is None, (
                f"kill {kill}, history {history}, step {first} ({step.kind}) in flight: {problem}; "
                f"or, with it: {other}"
            )
            state, first = step.after, first + 1
    print(f"{args.kills} kills, {steps} reported steps, all of them kept")


if __name__ == "__main__":
    main()
