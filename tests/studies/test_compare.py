"""`study compare`: the paired bootstrap over classes of two runs."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from dmljax import main
from dmljax.studies import compare

CLASSES, PER_CLASS = 40, 12


def _write(folder, hits, labels, **marks):
    folder.mkdir()
    columns = {"recall_at_1": hits.astype(np.float32), "labels": labels.astype(np.int32)}
    marks = {"split": "test", "data": "abc"} | marks
    save_file(columns, folder / "scores.safetensors", metadata=marks)
    return folder


def _runs(seed, *, spread, difference=0.0, classes=CLASSES):
    """Hits of two nets whose difference in a class has this spread between classes."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(classes), PER_CLASS)
    level = rng.uniform(0.4, 0.9, classes)
    effects = rng.normal(difference, spread, classes)
    shares = [np.clip(level + sign * effects / 2, 0, 1)[labels] for sign in (1, -1)]
    return [rng.random(len(labels)) < share for share in shares], labels


def test_a_difference_between_classes(tmp_path, capsys):
    (a, b), labels = _runs(0, spread=0.05, difference=0.15)
    a, b = _write(tmp_path / "a", a, labels), _write(tmp_path / "b", b, labels)
    compared = compare.compare(a, b)
    hits = [np.float64(compare._read(x)[0]["recall_at_1"]) for x in (a, b)]
    assert np.isclose(compared.a, hits[0].mean()) and np.isclose(compared.b, hits[1].mean())
    # By a loop: draw classes, take all of their queries.
    rng, means = np.random.default_rng(1), []
    for _ in range(4000):
        drawn = rng.integers(CLASSES, size=CLASSES)
        means.append(np.mean([(hits[0] - hits[1])[labels == c].mean() for c in drawn]))
    np.testing.assert_allclose(
        [compared.low, compared.high], np.quantile(means, [0.025, 0.975]), atol=0.006
    )
    assert compared.p < 0.01
    assert main.main(["study", "compare", str(a), str(b)]) == 0
    printed = capsys.readouterr().out
    assert "difference +1" in printed and "not resolved" not in printed
    assert main.main(["study", "compare", str(a), str(a)]) == 0
    assert "p 1.000: not resolved" in capsys.readouterr().out


def test_type_1_error_is_that_of_classes(tmp_path):
    """Methods that differ by class but not on average: queries as units reject too often."""
    rejected, by_queries = [], []
    for seed in range(60):
        (x, y), labels = _runs(seed, spread=0.3, classes=60)
        a, b = (_write(tmp_path / f"{seed}{n}", h, labels) for n, h in (("a", x), ("b", y)))
        compared = compare.compare(a, b)
        rejected.append(not compared.low <= 0 <= compared.high)
        d = x.astype(float) - y
        by_queries.append(abs(d.mean()) > 1.96 * d.std() / len(d) ** 0.5)
    assert np.mean(rejected) < 0.15 < np.mean(by_queries)


def test_runs_that_cannot_be_compared_are_one_line(tmp_path):
    (x, y), labels = _runs(0, spread=0.1)
    a = _write(tmp_path / "a", x, labels)
    other_data = _write(tmp_path / "b", y, labels, data="abd")
    few = _write(tmp_path / "c", x[:24], labels[:24])
    (tmp_path / "d").mkdir()
    damaged = _write(tmp_path / "e", y, labels)
    (damaged / "scores.safetensors").write_bytes(b"1234567890")
    for b, message in (
        (other_data, "not of the same queries: data is abd|not of the same queries: data is abc"),
        (tmp_path / "d", "has no scores.safetensors"),
        (damaged, "is damaged"),
    ):
        with pytest.raises((ValueError, OSError), match=message):
            compare.compare(a, b)
    with pytest.raises(ValueError, match="2 test classes: a bootstrap over classes needs 20"):
        compare.compare(few, few)
    with pytest.raises(ValueError, match="compare has no score 'MAP'"):
        compare.compare(a, a, score="MAP")
