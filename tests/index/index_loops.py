"""A naive index: a dict, and loops over all items. The referee of the real ones."""

import math

import numpy as np


def unit_vectors(rng, count, dimension=8):
    """Draws unit vectors in float32."""
    x = rng.normal(size=(count, dimension))
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


def random_vectors(rng, count, dimension, similarity):
    """Draws vectors in float32: unit vectors for cosines, others around a point far from zero."""
    if similarity == "cosine":
        return unit_vectors(rng, count, dimension)
    return (5 + 2 * rng.normal(size=(count, dimension))).astype(np.float32)


class NaiveIndex:
    """Items in the order of their addition: id -> (vector, metadata)."""

    def __init__(self, similarity="cosine"):
        self.items = {}
        self._similarity = similarity

    def add(self, ids, vectors, metadata=None, *, replace=False):
        for i, name in enumerate(ids):
            if replace:
                self.items.pop(name, None)
            assert name not in self.items
            self.items[name] = (vectors[i], {} if metadata is None else metadata[i] or {})

    def delete(self, ids):
        for name in ids:
            del self.items[name]

    def search(self, queries, k, where=None, threshold=None):
        """Ids, similarities and metadata, best first; of equal ones the earlier item first."""
        results = []
        for query in queries:
            hits = []
            for name, (vector, metadata) in self.items.items():
                pairs = [(float(a), float(b)) for a, b in zip(query, vector, strict=True)]
                similarity = sum(a * b for a, b in pairs)
                if self._similarity == "euclidean":
                    similarity = -math.sqrt(sum((a - b) ** 2 for a, b in pairs))
                if matches(metadata, where) and (threshold is None or similarity >= threshold):
                    hits.append((name, similarity, metadata))
            hits.sort(key=lambda hit: -hit[1])  # stable
            results.append(hits[:k])
        return results

    def search_ids(self, ids, k, where=None):
        results = []
        for name in ids:
            vector = self.items[name][0]
            hits = self.search([vector], len(self.items), where)[0]
            results.append([hit for hit in hits if hit[0] != name][:k])
        return results


def matches(metadata, where):
    return all(_matches(metadata.get(field), wanted) for field, wanted in (where or {}).items())


def _matches(value, wanted):
    if isinstance(wanted, dict):
        relations = [(x, b if isinstance(b, list) else [b]) for x, b in wanted.items()]
        return all(any(_in_range(value, x, bound) for bound in bounds) for x, bounds in relations)
    values = wanted if isinstance(wanted, list) else [wanted]
    return any(_kind(value) == _kind(other) and value == other for other in values)


def _kind(value):
    for kind, types in (
        ("null", type(None)),
        ("bool", bool),
        ("text", str),
        ("number", int | float),
    ):
        if isinstance(value, types):
            return kind
    return "other"


def _in_range(value, operator, bound):
    if _kind(value) != _kind(bound):
        return False
    return {
        "<": lambda: value < bound,
        "<=": lambda: value <= bound,
        ">": lambda: value > bound,
        ">=": lambda: value >= bound,
    }[operator]()


def same(results, expected):
    """Ids, order and metadata are equal, and similarities as far as sums in another order are."""
    assert [[hit.id for hit in hits] for hits in results] == [[h[0] for h in e] for e in expected]
    assert [[h.metadata for h in hits] for hits in results] == [[h[2] for h in e] for e in expected]
    for hits, other in zip(results, expected, strict=True):
        np.testing.assert_allclose([h.similarity for h in hits], [h[1] for h in other], atol=1e-12)
