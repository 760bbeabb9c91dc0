"""Samplers have the properties that their docstrings state, at any step and in any order."""

import collections
import itertools

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from dmljax.data import sampling
from dmljax.data.sampling import balanced, base, published, sampler


@st.composite
def _cases(draw):
    counts = draw(st.lists(st.integers(1, 12), min_size=1, max_size=14))
    classes = draw(st.integers(1, len(counts)))
    per_class = draw(st.integers(1, 5))
    hypothesis.assume(classes * per_class <= sum(counts))
    labels = np.repeat(np.arange(len(counts)) * 3 + 1, counts)
    order = np.random.default_rng(draw(st.integers(0, 99))).permutation(len(labels))
    return labels[order], classes, per_class


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(_cases(), st.integers(0, 2**31), st.integers(0, 2**40))
def test_class_balanced_batches_have_p_classes_and_k_distinct_images(case, seed, step):
    labels, classes, per_class = case
    kwargs = dict(classes=classes, per_class=per_class, seed=seed)
    indices = sampling.class_balanced(labels, step=step, **kwargs)
    assert indices.shape == (classes * per_class,)
    rows = labels[indices].reshape(classes, per_class)
    assert (rows == rows[:, :1]).all() and len(set(rows[:, 0].tolist())) == classes
    for row in indices.reshape(classes, per_class):
        available = (labels == labels[row[0]]).sum()
        assert len(set(row.tolist())) == min(per_class, available)
    # The function is pure, and takes groups as well as labels.
    assert (sampling.class_balanced(sampling.group(labels), step=step, **kwargs) == indices).all()


def test_class_balanced_uses_every_image_once_if_no_class_is_left_out():
    labels = np.repeat(np.arange(6), 8)
    used = [
        sampling.class_balanced(labels, classes=3, per_class=4, seed=5, step=s)
        for s in range(4)  # 48 images, 12 a step
    ]
    assert sorted(np.concatenate(used)) == list(range(48))


@hypothesis.settings(deadline=None, max_examples=30)
@hypothesis.given(_cases())
def test_class_balanced_deals_classes_evenly_and_images_of_a_class_evenly(case):
    labels, classes, per_class = case
    groups = sampling.group(labels)
    batches, left, cycle = balanced._round(len(groups.count), classes)
    dealt, used = collections.Counter(), collections.Counter()
    for step in range(batches * int(cycle)):
        plan = sampling.class_balanced(
            groups, classes=classes, per_class=per_class, seed=1, step=step
        )
        dealt.update(labels[plan[::per_class]].tolist())
        used.update(plan.tolist())
    assert set(dealt.values()) == {int(cycle) - int(cycle) * left // len(groups.count)}
    for c in range(len(groups.count)):
        times = [used[int(i)] for i in groups.images(c)]
        passes = dealt[int(labels[groups.images(c)[0]])] / -(-len(times) // per_class)
        # In a pass, every image is dealt at least once, and at most twice in a large class.
        assert min(times) >= int(passes)
        assert max(times) <= np.ceil(passes) * (1 + -(-per_class // len(times)))


def test_class_balanced_changes_with_seed_round_cycle_class_and_pass():
    """Of 7 classes, a round deals 6 in two batches; a cycle of 7 rounds leaves out each once."""
    labels = np.repeat(np.arange(7), 8)
    plans = np.stack(
        [
            sampling.class_balanced(labels, classes=3, per_class=4, seed=seed, step=step)
            for seed in range(3)
            for step in range(4 * 7 * 2)
        ]
    )
    assert len(np.unique(plans, axis=0)) == len(plans)
    of_seed = plans[: 4 * 7 * 2]
    rounds = labels[of_seed[:, ::4]].reshape(-1, 6)
    assert len(np.unique(rounds, axis=0)) == 4 * 7
    left_out = (21 - rounds.sum(axis=1)).reshape(4, 7)
    assert len(np.unique(left_out, axis=0)) == 4
    dealt = of_seed.reshape(-1)
    orders = np.concatenate([dealt[labels[dealt] == c].reshape(-1, 8) - 8 * c for c in range(7)])
    assert len(np.unique(orders, axis=0)) == 7 * 4 * 6 // 2  # two deals are a pass


def test_class_balanced_takes_all_classes_if_there_are_fewer_than_asked_for():
    labels = np.repeat(np.arange(12), 20)
    options = dict(per_class=4, seed=0, step=5)
    smaller = sampling.class_balanced(labels, classes=16, **options)
    assert (smaller == sampling.class_balanced(labels, classes=12, **options)).all()
    assert len(set(labels[smaller].tolist())) == 12


@hypothesis.settings(deadline=None, max_examples=40)
@hypothesis.given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 9))
def test_uniform_uses_every_image_once_an_epoch(n, batch_size, seed):
    hypothesis.assume(batch_size <= n)
    labels = np.zeros(n, int)
    steps = 3 * n  # n steps of any size end on an epoch
    stream = np.concatenate(
        [
            sampling.uniform(labels, batch_size=batch_size, seed=seed, step=step)
            for step in range(-(-steps // batch_size))
        ]
    )
    epochs = stream[: 3 * n].reshape(3, n)
    assert (np.sort(epochs, axis=1) == np.arange(n)).all()
    assert n < 9 or len(np.unique(epochs, axis=0)) == 3


def _epoch_of_class_chunks(labels, classes, per_class, epoch, seed=0):
    groups = sampling.group(labels)
    steps = published.chunks_epoch_length(groups, classes=classes, per_class=per_class)
    return [
        sampling.class_chunks(groups, classes=classes, per_class=per_class, seed=seed, step=step)
        for step in range(epoch * steps, (epoch + 1) * steps)
    ]


def _epoch_end(sample_fn, labels, seed=0, **options):
    return sampler.epoch_end_fn(sampler.bind(sample_fn, **options), labels, seed=seed)


def test_epochs_of_class_chunks_uniform_and_class_balanced_have_one_length():
    # In fours, these classes make 2, 2, 3 and 4 chunks.
    labels = np.repeat(np.arange(4), (2, 5, 9, 12))
    combine = _epoch_end(sampling.class_chunks, labels, classes=2, per_class=4)
    length = -(-(2 + 2 + 3 + 4) // 2)
    assert [combine(n) for n in (1, 2.5, 10)] == [length, 2.5 * length, 10 * length]
    assert _epoch_end(sampling.uniform, labels, batch_size=5)(3) == 3 * (28 // 5)
    assert _epoch_end(sampling.class_balanced, labels, classes=4, per_class=6)(7) == 7
    foreign = _epoch_end(lambda groups, *, seed, step: np.arange(5), labels)
    assert foreign(2) == 2 * (28 // 5)


@pytest.mark.parametrize("seed", [0, 7])
def test_an_epoch_of_random_class_count_ends_where_it_ends(seed):
    labels = np.repeat(np.arange(40), 30)
    groups = sampling.group(labels)
    epoch_end = _epoch_end(sampling.random_class_count, labels, seed=seed, batch_size=54)
    ends = [epoch_end(n) for n in range(12)]
    lengths = np.diff(ends)
    assert ends[0] == 0 and len(set(lengths.tolist())) > 2
    for epoch, (start, end) in enumerate(itertools.pairwise(ends)):
        # The first and the last step between the ends, and no other, belong to this epoch.
        epochs = [published._epoch(groups, p, 54 // p, seed, epoch) for p in (2, 3, 6, 9, 18, 27)]
        for step, row in ((start, 0), (end - 1, -1)):
            batch = sampling.random_class_count(groups, seed=seed, step=step)
            assert any(len(e) == end - start and (e[row] == batch).all() for e in epochs)
    assert epoch_end(2.5) == (ends[2] + ends[3]) / 2


def test_an_epoch_of_cars196_has_its_published_length():
    # 8,054 images of 98 classes, most with 80 to 84, in batches of ten chunks of seven.
    labels = np.repeat(np.arange(98), np.full(98, 82) + (np.arange(98) < 18))
    assert _epoch_end(sampling.class_chunks, labels, classes=10, per_class=7)(1) == -(
        -98 * 12 // 10
    )


@hypothesis.settings(deadline=None, max_examples=40)
@hypothesis.given(_cases(), st.integers(0, 3))
def test_an_epoch_of_class_chunks_has_the_published_chunks(case, epoch):
    labels, classes, per_class = case
    batches = np.stack(_epoch_of_class_chunks(labels, classes, per_class, epoch))
    rows = batches.reshape(-1, per_class)
    assert (labels[rows] == labels[rows[:, :1]]).all()
    groups = sampling.group(labels)
    # floor(max(len, K) / K) + 1 chunks per class, then repeated ones to fill the last batch.
    expected = {
        int(labels[groups.images(c)[0]]): max(int(n), per_class) // per_class + 1
        for c, n in enumerate(groups.count)
    }
    chunks = collections.Counter(labels[rows[:, 0]].tolist())
    assert all(chunks[c] >= n for c, n in expected.items())
    assert sum(chunks.values()) == -(-sum(expected.values()) // classes) * classes
    assert set(rows.ravel().tolist()) == set(range(len(labels)))


def test_class_chunks_repeats_classes_as_often_as_published():
    """100 classes of about 59 images: 117 batches of 6 x 9 per epoch, some with a class twice."""
    counts = np.r_[np.full(64, 59), np.full(36, 58)]
    labels = np.repeat(np.arange(100), counts)
    batches = _epoch_of_class_chunks(labels, 6, 9, 0)
    assert len(batches) == 117
    twice = sum(len(set(labels[b.reshape(6, 9)[:, 0]].tolist())) < 6 for b in batches)
    assert 4 <= twice <= 35


def test_random_class_count_draws_each_divisor_equally_often_and_fills_every_batch():
    labels = np.repeat(np.arange(40), 30)
    ends = published.class_count_epoch_ends(sampling.group(labels), seed=7, epochs=200)
    starts = [0, *ends.tolist()]
    counts = collections.Counter()
    for step in starts[:-1]:
        batch = labels[sampling.random_class_count(labels, seed=7, step=step)]
        assert len(batch) == 54
        # Adjacent chunks may have the same class: the shortest run is at least a chunk.
        counts[int(np.diff(np.flatnonzero(np.diff(batch, prepend=-1, append=-1))).min())] += 1
    sizes = {27, 18, 9, 6, 3, 2}  # images of a class
    assert sum(counts[size] for size in sizes) > 150 and min(counts[x] for x in sizes) > 12
    few = np.repeat(np.arange(4), 30)
    assert all(len(sampling.random_class_count(few, seed=0, step=s)) == 54 for s in range(60))


@hypothesis.settings(deadline=None, max_examples=40)
@hypothesis.given(st.lists(st.integers(1, 5), min_size=2, max_size=20), st.integers(0, 2**40))
def test_n_pairs_are_anchors_then_positives(counts, step):
    labels = np.repeat(np.arange(len(counts)), counts)
    pair_count = sum(n > 1 for n in counts)
    hypothesis.assume(pair_count)
    batch = sampling.n_pairs(labels, classes=pair_count, seed=0, step=step)
    anchors, positives = batch.reshape(2, pair_count)
    assert (labels[anchors] == labels[positives]).all() and (anchors != positives).all()
    assert len(set(labels[anchors].tolist())) == pair_count


def test_abe_pairs_are_half_positive_and_half_negative():
    rng = np.random.default_rng(0)
    labels = rng.permutation(np.repeat(np.arange(12), rng.integers(1, 20, 12)))
    partners = collections.Counter()
    for step in range(400):
        batch = sampling.abe_pairs(labels, batch_size=32, seed=1, step=step)
        first, second = batch.reshape(2, 16)
        same = labels[first] == labels[second]
        assert same[:8].all() and not same[8:].any()
        assert (first != second).all() and len(set(first.tolist())) == 16
        partners.update(second.tolist())
    candidates = [i for i, c in enumerate(labels) if (labels == c).sum() > 1]
    assert set(candidates) <= set(partners)  # every image becomes a partner


@pytest.mark.parametrize(
    "function, kwargs",
    [
        (sampling.class_balanced, dict(classes=4, per_class=2)),
        (sampling.uniform, dict(batch_size=8)),
        (sampling.class_chunks, dict(classes=4, per_class=2)),
        (sampling.random_class_count, dict(batch_size=12)),
        (sampling.n_pairs, dict(classes=4)),
        (sampling.abe_pairs, dict(batch_size=8)),
        (
            sampling.nearest_classes,
            dict(classes=4, per_class=2, near=1, neighbors=(np.arange(9)[:, None] + [1, 2]) % 9),
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_batch_depends_on_seed_and_step_alone(function, kwargs):
    labels = np.repeat(np.arange(9), 7)

    def at(seed, step):
        return tuple(function(labels, seed=seed, step=step, **kwargs).tolist())

    forward = [at(3, step) for step in range(40)]
    base.permutation.cache_clear()
    published._epoch.cache_clear()
    assert [at(3, step) for step in reversed(range(40))] == forward[::-1]
    assert len(set(forward)) > 35 and forward != [at(4, step) for step in range(40)]


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(_cases(), st.integers(1, 5), st.integers(0, 3), st.integers(0, 2**40))
def test_nearest_classes_come_with_the_classes_that_are_dealt(case, near, columns, step):
    labels, classes, per_class = case
    total = len(set(labels.tolist()))
    rng = np.random.default_rng(step)
    columns = min(columns, total - 1)
    others = [rng.permutation(np.setdiff1d(np.arange(total), c))[:columns] for c in range(total)]
    table = np.array(others, int).reshape(total, columns)
    options = dict(classes=classes, per_class=per_class, near=near, seed=5, step=step)
    indices = sampling.nearest_classes(labels, neighbors=table, **options)
    rows = labels[indices].reshape(classes, per_class)
    assert (rows == rows[:, :1]).all()
    for row in indices.reshape(classes, per_class):
        assert len(set(row.tolist())) == min(per_class, (labels == labels[row[0]]).sum())
    names = np.unique(labels)
    chosen = np.searchsorted(names, rows[:, 0]).tolist()
    assert len(set(chosen)) == classes
    # A loop over the table is the referee: dealt classes first, then the neighbors of each.
    dealt = -(-classes // (near + 1))
    expected = chosen[:dealt]
    for c in chosen[:dealt]:
        free = [int(n) for n in table[c] if n not in expected][:near]
        expected += free[: classes - len(expected)]
    assert chosen[: len(expected)] == expected
    groups = sampling.group(labels)
    again = sampling.nearest_classes(groups, neighbors=table, **options)
    assert (again == indices).all()
    options.pop("near")
    plain = sampling.class_balanced(groups, **options)
    assert (sampling.nearest_classes(groups, **options) == plain).all()


def test_places_that_neighbors_leave_go_to_any_class():
    labels, filled = np.arange(40) // 4, set()
    options = dict(classes=5, per_class=1, near=4, neighbors=np.zeros((10, 0), int), seed=0)
    for step in range(20):
        filled |= set(labels[sampling.nearest_classes(labels, **options, step=step)[1:]].tolist())
    assert filled == set(range(10))


_LABELS = np.repeat(np.arange(3), 3)


@pytest.mark.parametrize(
    "function, labels, options, match",
    [
        (
            sampling.class_balanced,
            _LABELS,
            dict(classes=3, per_class=4),
            "3 x 4 = 12 images is larger .* of 9: set --config.sampler.per_class=3",
        ),
        (sampling.class_chunks, _LABELS, dict(classes=0, per_class=4), "is empty"),
        (
            sampling.class_chunks,
            _LABELS,
            dict(classes=4, per_class=2),
            "4 classes, but .* only 3: set --config.sampler.classes=3",
        ),
        (
            sampling.uniform,
            _LABELS,
            dict(batch_size=10),
            "batch_size is 10, but .* has 9 .*: set --config.sampler.batch_size=9",
        ),
        (sampling.uniform, np.array([0.5, 1.0]), dict(batch_size=1), "integers .* not float64"),
        (
            sampling.random_class_count,
            np.zeros(99, int),
            {},
            "54 images cannot be divided among 2 or more",
        ),
        (sampling.n_pairs, _LABELS, dict(classes=4), "has 3: set --config.sampler.classes=3"),
        (sampling.abe_pairs, _LABELS, dict(batch_size=30), "multiple of 4"),
        (sampling.abe_pairs, np.arange(40), dict(batch_size=8), "two classes"),
        (sampling.nearest_classes, _LABELS, dict(classes=2, per_class=2, near=0), "near=0"),
        (
            sampling.nearest_classes,
            _LABELS,
            dict(classes=2, per_class=2, neighbors=np.zeros((4, 1), int)),
            r"neighbors must be \[3 n\], not \[4, 1\]",
        ),
    ],
)
def test_wrong_arguments_are_named(function, labels, options, match):
    with pytest.raises(ValueError, match=match):
        function(labels, seed=0, step=0, **options)
