"""The cross-batch memory against a deque, and against pytorch-metric-learning over many steps."""

import collections
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numeric import assert_near, gradient
from system import load_module

from dmljax import losses, ops

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "proxies.npz"
D = 4


class _Deque:
    """The referee: the last `size` rows that counted, oldest first."""

    def __init__(self, size):
        self.rows, self.next_id = collections.deque(maxlen=size), 0

    def step(self, x, labels, where):
        ids = []
        for row, label, counts in zip(x, labels, where, strict=True):
            ids.append(self.next_id if counts else None)
            if counts:
                self.rows.append((self.next_id, row.copy(), int(label)))
                self.next_id += 1
        return ids

    def contrastive(self, x, labels, ids, hardest=False):
        """Loop over all pairs; `hardest` keeps each anchor's farthest positive only."""
        pull, push = [], []
        for row, label, row_id in zip(x, labels, ids, strict=True):
            if row_id is None:
                continue
            positives = []
            for stored_id, stored, stored_label in self.rows:
                if stored_id == row_id:
                    continue
                gap = row / math.sqrt(sum(row**2)) - stored / math.sqrt(sum(stored**2))
                d = math.sqrt(sum(gap**2))
                if stored_label == label:
                    positives.append(d)
                else:
                    push.append(1 - d)
            pull += [max(positives)] if hardest and positives else positives
        active = [[v for v in terms if v > 0] for terms in (pull, push)]
        return sum(sum(terms) / len(terms) for terms in active if terms)


def _farthest_positive(distances, pairs):
    farthest = jnp.max(distances, axis=1, where=pairs.positives, initial=-1, keepdims=True)
    return ops.Pairs(pairs.positives & (distances == farthest), pairs.negatives)


@pytest.mark.parametrize("hardest", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_a_memory_has_the_rows_and_the_loss_of_a_deque(hardest, masked):
    """Sixteen batches of four in a memory of ten, compiled once."""
    rng = np.random.default_rng(8)
    memory_loss = losses.cross_batch_memory(losses.contrastive, size=10)
    keywords = {"mine_fn": _farthest_positive} if hardest else {}

    def loss(x, memory, labels, where):
        return memory_loss.loss(memory, x, labels, where=where, **keywords)

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    naive = _Deque(10)
    with jax.enable_x64(True):
        memory = memory_loss.init(D, dtype=np.float64)
        for _ in range(16):
            x, labels = rng.normal(size=(4, D)), rng.integers(0, 3, size=4)
            where = rng.random(4) < 0.7 if masked else np.ones(4, bool)
            x[~where] = np.nan
            (value, memory), slope = step(x, memory, labels, where)
            ids = naive.step(x, labels, where)
            x[~where] = 1
            expected = naive.contrastive(x, labels, ids, hardest)
            np.testing.assert_allclose(value, expected, rtol=1e-9, atol=1e-12)
            assert_near(
                slope,
                gradient(lambda x, y=labels, i=ids: naive.contrastive(x, y, i, hardest), x),
                1e-6,
            )
            # Slot by slot, starting with the oldest row.
            filled = int(memory.filled)
            assert filled == len(naive.rows)
            slots = (int(memory.pointer) - filled + np.arange(filled)) % 10
            assert [int(i) for i in memory.ids[slots]] == [row[0] for row in naive.rows]
            assert [int(y) for y in memory.labels[slots]] == [row[2] for row in naive.rows]
            stored = np.array([row[1] for row in naive.rows]).reshape(-1, D)
            np.testing.assert_array_equal(memory.embeddings[slots], stored)
        assert naive.next_id == int(memory.next_id) > 20


@pytest.mark.parametrize("name", ["contrastive", "ntxent", "triplet"])
def test_seven_steps_have_the_numbers_of_pytorch_metric_learning(name):
    module = load_module(GOLDEN.with_name("cases.py"))
    memory_loss = losses.cross_batch_memory(getattr(losses, name), size=module.SIZE)
    step = jax.jit(jax.value_and_grad(lambda x, m, y: memory_loss.loss(m, x, y), has_aux=True))
    with np.load(GOLDEN) as golden, jax.enable_x64(True):
        values, slopes = golden[f"memory/{name}/value"], golden[f"memory/{name}/0"]
        memory = memory_loss.init(module.D, dtype=np.float64)
        assert len(values) == 7
        for (x, y), expected, expected_slope in zip(module.steps(), values, slopes, strict=True):
            (value, memory), slope = step(x, memory, y)
            np.testing.assert_allclose(value, expected, rtol=1e-6)
            assert_near(slope, expected_slope, 1e-5)


@pytest.mark.parametrize("name", ["triplet", "n_pairs", "lifted_structure", "nca"])
def test_empty_slots_do_not_count(name):
    """A memory with empty slots gives the loss of a memory that is just full."""
    rng = np.random.default_rng(11)
    x, y = rng.normal(size=(4, D)).astype(np.float32), np.array([0, 1, 0, 1])
    results = []
    for size in (4, 9):
        memory_loss = losses.cross_batch_memory(getattr(losses, name), size=size)

        def loss(x, memory_loss=memory_loss):
            return memory_loss.loss(memory_loss.init(D), x, y)[0]

        results.append(jax.jit(jax.value_and_grad(loss))(x))
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-6)
    assert_near(results[1][1], results[0][1], 1e-5)


def test_wrong_arguments_are_named_and_an_empty_mask_changes_nothing(unchecked):
    memory_loss = losses.cross_batch_memory(losses.contrastive, size=3)
    memory = memory_loss.init(D)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(memory))
    x, y = np.ones((4, D), np.float32), np.zeros(4, int)
    with pytest.raises(ValueError, match=r"a batch \[4, 4\] needs a memory \[4 4\]"):
        memory_loss.loss(memory, x, y)
    with pytest.raises(ValueError, match=r"a memory \[3 2\], .*create it with init\(2\)"):
        memory_loss.loss(memory, x[:3, :2], y[:3])
    with pytest.raises(ValueError, match=r"labels must be int \[3\]"):
        memory_loss.loss(memory, x[:3], y)
    with pytest.raises(ValueError, match="labels reach 4294967296, which int32 cannot hold"):
        memory_loss.loss(memory, x[:3], y[:3] + 2**32)
    with pytest.raises(ValueError, match="size is"):
        losses.cross_batch_memory(losses.contrastive, size=0)
    value, after = jax.jit(memory_loss.loss)(memory, x[:3], y[:3], where=np.zeros(3, bool))
    assert value == 0
    jax.tree.map(np.testing.assert_array_equal, memory, after)


def test_a_donated_memory_in_half_precision_gives_a_float32_loss():
    memory_loss = losses.cross_batch_memory(losses.contrastive, size=5)
    step = jax.jit(lambda m, x, y: memory_loss.loss(m, x, y), donate_argnums=0)
    memory = memory_loss.init(D, dtype=jnp.bfloat16)
    x = jnp.asarray(np.random.default_rng(12).normal(size=(3, D)), jnp.bfloat16)
    for _ in range(3):
        value, memory = step(memory, x, np.array([0, 1, 0]))
    assert value.dtype == jnp.float32 and memory.embeddings.dtype == jnp.bfloat16
    assert np.isfinite(value) and int(memory.pointer) == 9 % 5


@pytest.mark.parametrize("offset", [0, 1 << 31, 1 << 40])
def test_labels_of_any_size_are_not_cut_when_they_are_stored(offset):
    memory_loss = losses.cross_batch_memory(losses.contrastive, size=6)
    x = np.random.default_rng(3).normal(size=(6, D)).astype(np.float32)
    y = np.array([0, 0, 1, 1, 2, 2])
    expected = losses.contrastive(x, y)
    with jax.enable_x64(True):
        value, memory = memory_loss.loss(memory_loss.init(D), x, y + offset)
        np.testing.assert_array_equal(memory.labels, y + offset)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    unsigned = (y + 3_000_000_000).astype(np.uint32)
    value, _ = memory_loss.loss(memory_loss.init(D), x, unsigned)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    memory = memory_loss.init(D)
    with jax.enable_x64(True):
        value, _ = memory_loss.loss(memory_loss.init(D), x, unsigned)
        np.testing.assert_allclose(value, expected, rtol=1e-6)
        with pytest.raises(ValueError, match="labels are int64, but the memory stores int32"):
            memory_loss.loss(memory, x, y)
