"""The scores of queries in a file, and comparisons of runs by these files."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from dmljax import metrics
from dmljax.data.splits import Split
from dmljax.report import comparison, scores_file

CLASSES = tuple(f"class {i}" for i in range(24))


def _split(labels, names=CLASSES, **marks):
    return Split(np.arange(len(labels)), labels, names, **marks)


def _embeddings(noise, *, seed=0, per_class=8):
    rng = np.random.default_rng(7)
    labels = np.repeat(np.arange(24), per_class)
    centers = rng.standard_normal((24, 12))
    spread = np.random.default_rng(seed).standard_normal((len(labels), 12))
    return (centers[labels] + noise * spread).astype(np.float32), labels


def _scores(noise, *, seed=0, **options):
    embeddings, labels = _embeddings(noise, seed=seed)
    return scores_file.score(embeddings, _split(labels), **options)


@pytest.mark.parametrize("protocol", [False, True])
def test_scores_of_a_split(protocol):
    embeddings, labels = _embeddings(1.0)
    marks = {}
    if protocol:
        query = np.random.default_rng(1).random(len(labels)) < 0.4
        marks = {"query": query, "gallery": ~query, "groups": np.arange(len(labels)) % 30 - 1}
    embeddings[5] = np.nan
    scores = scores_file.score(embeddings, _split(labels, **marks), data="d", step=7)
    rows = np.flatnonzero(np.isfinite(embeddings).all(axis=1) & marks.get("query", True))
    assert scores.queries.tolist() == rows.tolist() and (scores.labels == labels[rows]).all()
    items = np.isfinite(embeddings).all(axis=1) & marks.get("gallery", True)
    for place, row in enumerate(rows):
        distances = ((embeddings - embeddings[row]) ** 2).sum(axis=1)
        allowed = items & (np.arange(len(labels)) != row)
        if protocol:
            same = marks["groups"] == marks["groups"][row]
            allowed &= ~same | (marks["groups"][row] < 0)
        order = [j for j in np.argsort(distances) if allowed[j]]
        hits = [j for j, item in enumerate(order) if labels[item] == labels[row]]
        assert scores.first[place] == (hits[0] + 1 if hits else 0)
        assert np.isnan(scores.recall_at_1[place]) == (not hits)
        assert np.isnan(scores.values["MRR"][place]) == (not hits)
        if hits:
            assert scores.recall_at_1[place] == (hits[0] == 0)
            assert scores.values["MRR"][place] == pytest.approx(1 / (hits[0] + 1))
            right = [h + 1 for h in hits if h < len(hits)]
            expected = sum((i + 1) / r for i, r in enumerate(right)) / len(hits)
            assert scores.map_at_r[place] == pytest.approx(expected, abs=1e-6)
            assert scores.r_precision[place] == pytest.approx(len(right) / len(hits))


def test_file_keeps_everything(tmp_path):
    scores = _scores(1.0, data="digest", step=12)
    path = scores_file.write(tmp_path, scores)
    assert [p.name for p in tmp_path.iterdir()] == ["scores.safetensors"] and path.is_file()
    for a, b in zip(scores, scores_file.read(tmp_path), strict=True):
        np.testing.assert_array_equal(a, b)


def test_missing_and_damaged_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no scores.safetensors: finish the run"):
        scores_file.read(tmp_path)
    path = scores_file.write(tmp_path, _scores(1.0))
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"is damaged .*: `dmljax report"):
        scores_file.read(tmp_path)
    save_file({"first": np.zeros(3)}, path)
    with pytest.raises(ValueError, match="its format is of another version"):
        scores_file.read(tmp_path)


def test_refused_test_sets_say_in_what_they_differ():
    a = _scores(1.0)
    embeddings, labels = _embeddings(1.0)
    swapped = labels.copy()
    swapped[[0, 100]] = swapped[[100, 0]]
    unreadable = embeddings.copy()
    unreadable[3] = np.nan
    unsure = "the images, the labels, the names of classes, or the protocol"
    cases = {
        "192 and 190": (embeddings[:-2], _split(labels[:-2])),
        "24 and 25": (embeddings, _split(labels, (*CLASSES, "more"))),
        "192 and 191": (unreadable, _split(labels)),
        unsure: (embeddings, _split(swapped)),
        f"{unsure}$": (embeddings, _split(labels, (*CLASSES[:3], "x", *CLASSES[4:]))),
        unsure[:30]: (embeddings, Split(np.arange(len(labels)) + 1, labels, CLASSES)),
    }
    for reason, (vectors, split) in cases.items():
        b = scores_file.score(vectors, split)
        with pytest.raises(ValueError, match=f"test sets differ in .*{reason}"):
            comparison.compare_runs({"a": a, "b": b})
    b = scores_file.score(embeddings, _split(labels), name="val")
    with pytest.raises(ValueError, match=r"the split \(test and val\)"):
        comparison.compare_runs({"a": a, "b": b})


def test_two_runs():
    a, b = _scores(1.6, seed=1), _scores(0.8, seed=2)
    result = comparison.compare_runs({"a": a, "b": b})
    assert result.queries == 192 and result.classes == 24 and result.range_note == ""
    for name in ("R@1", "MAP@R", "RP", "MRR"):
        rows = result.scores[name]
        assert rows["a"].comparison is None and rows["b"].comparison.verdict == "better"
        assert rows["b"].mean - rows["a"].mean == pytest.approx(rows["b"].comparison.difference)
        assert rows["a"].low < rows["a"].mean < rows["a"].high
        assert rows["a"][1:3] == metrics.interval(a.values[name], groups=a.labels)
    right = a.recall_at_1 == 1, b.recall_at_1 == 1
    assert result.mcnemar["b"].only_first == (right[1] & ~right[0]).sum()
    assert result.mcnemar["b"].only_second == (right[0] & ~right[1]).sum()
    assert (
        comparison.compare_runs({"b": b, "a": a}).scores["R@1"]["a"].comparison.verdict == "worse"
    )


def test_runs_whose_scores_are_means_over_classes(tmp_path):
    a, b = _scores(1.6, seed=1), _scores(0.8, seed=2)
    labels = np.sort(np.random.default_rng(0).integers(0, 24, len(a.labels)))
    runs = {"a": a._replace(labels=labels), "b": b._replace(labels=labels)}
    for name, scores in runs.items():
        (tmp_path / name).mkdir()
        scores_file.write(tmp_path / name, scores)
        (tmp_path / name / "config.json").write_text('{"evaluate": {"average": "classes"}}')
    folders = {name: tmp_path / name for name in runs}
    result = comparison.read(folders)
    rows = result.scores["R@1"]
    for name, row in rows.items():
        of_classes = [runs[name].recall_at_1[labels == c].mean() for c in np.unique(labels)]
        assert row.mean == pytest.approx(np.mean(of_classes))
    assert rows["b"].mean - rows["a"].mean == pytest.approx(rows["b"].comparison.difference)
    assert "means over classes" in " ".join(result.notes)
    (tmp_path / "b" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"a over classes, b over queries: compare runs"):
        comparison.read(folders)


def test_p_values_for_a_reader():
    p_values = 0.0123, 0.0051, 0.0009, float("nan")
    assert [comparison.p_text(p) for p in p_values] == ["0.012", "0.005", "< 0.001", "-"]


def test_equal_runs():
    a = _scores(1.2)
    row = comparison.compare_runs({"a": a, "again": a}).scores["R@1"]["again"]
    assert row.comparison == (0, 0, 0, 1, "not resolved")
    assert comparison.class_changes(a, a) == []


def test_several_runs_are_adjusted():
    runs = {str(seed): _scores(1.1 if seed == 5 else 1.2, seed=seed) for seed in (0, 1, 2, 3, 5)}
    several = comparison.compare_runs(runs).scores["MAP@R"]
    alone = [
        comparison.compare_runs({"0": runs["0"], name: runs[name]}).scores["MAP@R"][name]
        for name in list(runs)[1:]
    ]
    expected = metrics.holm([row.comparison.p for row in alone])
    for name, p in zip(list(runs)[1:], expected, strict=True):
        assert several[name].comparison.p == pytest.approx(p)
        if p > 0.05:
            assert several[name].comparison.verdict == "not resolved"
    assert alone[-1].comparison.verdict == "better" and expected[-1] > 0.05


def test_few_classes_are_not_told_apart():
    """A class with one image has no score and does not count."""
    embeddings, labels = _embeddings(1.6)
    rows = (labels < 5) | (np.arange(len(labels)) % 8 == 0)
    runs = {
        name: scores_file.score(x[rows], _split(labels[rows]))
        for name, x in (("a", embeddings), ("b", _embeddings(0.2)[0]))
    }
    result = comparison.compare_runs(runs)
    assert result.range_note == "no range: 5 classes, and it needs 8"
    assert result.queries == 40 and result.classes == 5
    assert result.scores["R@1"]["b"].comparison.verdict == "not resolved"


def test_changes_by_class():
    a, b = _scores(1.6, seed=1), _scores(1.4, seed=2)
    is_scored = np.arange(len(a.first)) % 5 > 0
    a, b = (x._replace(first=np.where(is_scored, x.first, 0)) for x in (a, b))
    changes = comparison.class_changes(a, b)
    sizes = [abs(change.change) for change in changes]
    assert sizes == sorted(sizes, reverse=True) and changes
    total = sum(len(c.only_second) - len(c.only_first) for c in changes)
    assert total == (b.first == 1).sum() - (a.first == 1).sum()
    for change in changes:
        label = CLASSES.index(change.name)
        assert change.queries == is_scored[a.labels == label].sum()
        for query in change.only_second.tolist():
            assert a.labels[query] == label and a.first[query] != 1 == b.first[query]
