"""A third store, as its author would write it: one file, and one row in `stores.STORES`.

It keeps everything in the memory of this process, without a graph. The contract tests run over it
as over the others, so all that `Index` promises comes from `base.py` and these methods.
"""

import contextlib
import copy
import json
import threading

import numpy as np
from index_loops import matches

from dmljax.index import nearest
from dmljax.index.base import Hit, Index, Item, State
from dmljax.index.errors import InvalidInput, Locked
from dmljax.index.view import Answers


class Content:
    """One generation: items by id in the order of addition, and what was changed so far."""

    def __init__(self, settings):
        self.settings, self.version = settings, 0
        self.items, self.fields = {}, set()


class Place:
    """The generations of an index, and the lock of its writer."""

    def __init__(self):
        self.generations, self.current, self.writer = {}, 1, threading.Lock()


PLACES = {}


class MemoryIndex(Index):
    """An index in the memory of this process."""

    @classmethod
    def create(cls, place, settings):
        if place in PLACES:
            raise InvalidInput(f"{place} exists already: open it, or choose another name")
        PLACES[place] = Place()
        PLACES[place].generations[1] = Content(settings)
        return cls(place, 1, write=True)

    @classmethod
    def open(cls, place, *, write):
        if place not in PLACES:
            raise FileNotFoundError(f"{place} does not exist: it is no index of dmljax")
        return cls(place, PLACES[place].current, write=write)

    @classmethod
    def reindex(cls, place, settings, *, continues):
        generations, new = PLACES[place].generations, PLACES[place].current + 1
        if new not in generations or generations[new].settings != settings or not continues:
            generations[new] = Content(settings)
        return cls(place, new, write=True)

    @classmethod
    def signature(cls, place):
        return id(PLACES[place]) if place in PLACES else None

    def __init__(self, place, generation, *, write):
        super().__init__(place, generation, write=write)
        self._place = PLACES[place]
        if write and not self._place.writer.acquire(blocking=False):
            raise Locked(f"{place} is being written by this process: close it there")
        self._content = self._place.generations[generation]
        self.model, self.dimension, self.similarity = self._content.settings

    def close(self):
        if not self._closed and self.writable:
            self._place.writer.release()
        self._closed = True

    def _current(self):
        return self._place.current

    def _switch(self):
        self._place.current = self.generation

    def _discard(self):
        self.close()
        PLACES.pop(self.place)

    def _read(self, read_fn):
        with self._lock:
            self._check_open()
            return read_fn(self._content)

    def _change(self, change_fn):
        with self._lock:
            self._check_open()
            changed = copy.copy(self._content)
            changed.items, changed.fields = dict(changed.items), set(changed.fields)
            changed.version += 1
            change_fn(changed)
            vars(self._content).update(vars(changed))  # nothing happened before this line

    @contextlib.contextmanager
    def _snapshot(self):
        self._check_open()
        yield copy.copy(self._content)

    def _state(self, content):
        return State(content.version, len(content.items))

    def _existing(self, content, ids):
        return [name for name in ids if name in content.items]

    def _items(self, content, ids):
        for name in content.items if ids is None else self._existing(content, ids):
            vector, text = content.items[name]
            yield Item(name, vector.copy(), json.loads(text))

    def _insert(self, content, ids, vectors, metadata):
        content.items |= zip(ids, zip(vectors, metadata, strict=True), strict=True)
        content.fields |= {field for text in metadata for field in json.loads(text)}

    def _remove(self, content, ids):
        for name in ids:
            del content.items[name]

    def _fields(self, content, among=None):
        return content.fields if among is None else content.fields & set(among)

    def _matching(self, content, conditions):
        items = self._items(content, None)
        return [item for item in items if all(fulfills(item.metadata, x) for x in conditions)]

    def _count(self, content, conditions):
        return len(self._matching(content, conditions))

    def _search(self, content, queries, k, conditions, exact):
        items = self._matching(content, conditions)
        vectors = np.array([item.vector for item in items]).reshape(-1, self.dimension)
        rows, results = np.arange(len(items)), Answers()
        for query in queries:
            values = nearest.similarities(query, vectors, similarity=self.similarity)
            best = nearest.best(values, rows, k)
            results.append([Hit(items[i].id, float(values[i]), items[i].metadata) for i in best])
        return results

    def _graph_refusal(self):
        return InvalidInput("the memory store has no graph")

    def _build(self, approximate, recall):
        pass

    def _compact(self, approximate, recall):
        self._content.fields = {f for _, t in self._content.items.values() for f in json.loads(t)}

    def _problems(self, content):
        return []

    def _facts(self, content):
        return {"bytes": sum(vector.nbytes for vector, _ in content.items.values())}


def fulfills(metadata, condition):
    """Whether metadata fulfills a `filters.Condition`."""
    field, operator, values = condition
    return matches(metadata, {field: list(values) if operator == "=" else {operator: values[0]}})
