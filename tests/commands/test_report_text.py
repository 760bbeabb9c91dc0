"""`dmljax report --text`: a run, a comparison, and embeddings of another program."""

import shutil

import numpy as np
import pytest
from system import tiny

from dmljax import main, metrics
from dmljax.files import run_folder as results
from dmljax.report import page, scores_file
from dmljax.runs import training
from dmljax.train import journal


@pytest.fixture(scope="module")
def runs(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    shutil.copytree(source, folder / "a")
    training.run(tiny(source.parent, seed=1), folder / "b")
    return folder


def _printed(capsys, *words):
    assert main.main(["report", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_a_finished_run_leaves_the_scores_of_its_queries(runs):
    scores = scores_file.read(runs / "a")
    result = results.read(runs / "a")
    for name, values in scores.values.items():
        assert np.nanmean(values) == pytest.approx(result.scores[f"test/{name}"], abs=1e-6)
    assert scores.step == result.chosen.step and scores.split == "test"
    assert scores.data == result.digests["data"]


def test_a_comparison(runs, capsys):
    text = _printed(capsys, runs / "a", runs / "b", "--text")
    a, b = (results.read(runs / name).scores["test/R@1"] for name in "ab")
    assert f"{100 * a:.1f}" in text and f"{100 * b:.1f}" in text and f"{100 * (b - a):+.1f}" in text
    assert "not resolved" in text  # too few classes for a verdict
    assert "of the queries are right only in b" in text
    assert "No range:" in text


def test_a_run(runs, capsys):
    (runs / "a" / scores_file.FILE).unlink()
    text = _printed(capsys, runs / "a", "--text")
    lines = journal.read(runs / "a" / "metrics.jsonl")
    last = next(line for line in reversed(lines) if "test/R@1" in line)
    for name in ("R@1", "MAP@R", "NMI"):
        line = next(x for x in text.splitlines() if x.split()[:1] == [name])
        assert line.split()[1] == f"{100 * last[f'test/{name}']:.1f}"
    assert scores_file.read(runs / "a").step == 6  # written again


def _files(folder, vectors, labels):
    np.save(folder / "x.npy", vectors)
    np.save(folder / "y.npy", labels)
    return f"--embeddings={folder / 'x.npy'}", f"--labels={folder / 'y.npy'}", "--text"


def test_embeddings_of_another_program(tmp_path, capsys):
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(12), 10)
    vectors = np.eye(12, 16)[labels] + 0.1 * rng.standard_normal((120, 16))
    labels[3:6] = 9
    vectors[7] = np.nan
    names = np.array([f"[bold]</script> {i}" for i in range(12)])
    text = _printed(capsys, *_files(tmp_path, vectors, names[labels]))
    assert "119 queries; 1 image could not be read" in text
    assert "only 12 classes: the range is rough" in text


def _against_baseline(folder, spread):
    """Words for embeddings of `spread` against a baseline of other dimensions; both arrays."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(12), 10)
    new = np.eye(12, 16)[labels] + spread * rng.standard_normal((120, 16))
    old = np.eye(12, 24)[labels] + 0.3 * rng.standard_normal((120, 24))
    new[7] = old[7] = np.nan
    np.save(folder / "old.npy", old)
    *words, _ = _files(folder, new, labels)
    return [*words, f"--baseline={folder / 'old.npy'}"], new, old, labels


def _mean_average_precision_at_r(x, labels):
    """By loops over queries and their sorted neighbors: values, and labels of the queries."""
    rows = [i for i in range(len(x)) if np.isfinite(x[i]).all()]
    values = []
    for i in rows:
        others = sorted((j for j in rows if j != i), key=lambda j: np.sum((x[i] - x[j]) ** 2))
        r = sum(labels[j] == labels[i] for j in others)
        hits = [labels[j] == labels[i] for j in others[:r]]
        values.append(sum(sum(hits[: k + 1]) / (k + 1) for k in range(r) if hits[k]) / r)
    return np.array(values), labels[rows]


@pytest.mark.parametrize("spread", [0.5, 0.1])
def test_embeddings_against_a_baseline(tmp_path, capsys, spread):
    words, new, old, labels = _against_baseline(tmp_path, spread)
    text = _printed(capsys, *words, "--text")
    (a, queries), (b, _) = (_mean_average_precision_at_r(x, labels) for x in (new, old))
    low, high = 100 * np.array(metrics.interval(a - b, groups=queries, samples=10_000))
    difference = 100 * (a - b).mean()
    first = text.splitlines()[0]
    if spread == 0.5:
        by = f"by {-difference:.1f} [{-high:.1f}, {-low:.1f}]"
        values = f"(MAP@R {100 * a.mean():.1f} against {100 * b.mean():.1f})"
        assert first == f"x.npy: worse than the baseline {by} {values}"
    else:
        assert "worse" not in text
    rows = text.splitlines()
    row = next(i for i, line in enumerate(rows) if line.split()[:2] == ["MAP@R", "old.npy"])
    assert rows[row].split()[2] == f"{100 * b.mean():.1f}"
    name, value, *_, verdict = rows[row + 1].split()
    assert (name, value) == ("x.npy", f"{100 * a.mean():.1f}")
    assert verdict == ("worse" if spread == 0.5 else "better")
    assert f"{difference:+.1f}" in rows[row + 1] and f"{low:+.1f} to {high:+.1f}" in rows[row + 1]
    assert "119 queries of 12 classes" in text

    out = tmp_path / "out.html"
    assert main.main(["report", *words, f"--out={out}"]) == 0
    printed = capsys.readouterr().out
    assert str(out) in printed and (first in printed) == (spread == 0.5)
    tree = page.read(out)
    assert tree["title"] == "old.npy and x.npy"
    assert tree["headline"].startswith("worse than the baseline by") == (spread == 0.5)
    assert tree["scores"]["tiles"][0]["value"] == pytest.approx(
        np.nanmean(tree["items"]["hits"][tree["items"]["hits"] < 2])
    )
    cells = next(r for r in tree["comparison"]["rows"] if r["score"] == "MAP@R")["cells"]
    assert [c["value"] for c in cells] == pytest.approx([b.mean(), a.mean()], abs=1e-5)
    assert len(tree["comparison"]["maps"]) == 2
    assert tree["comparison"]["config"] == [["dimensions", "24", "16"]]
    assert tree["comparison"]["config_title"] == "About the embeddings"
    assert tree["rule"] == "All other sections show x.npy."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x[:-1], "old.npy has 119 rows, but .*x.npy has 120: row i of both"),
        (lambda x: x[:, 0], r"old.npy must hold floating-point .*, got float64 of shape \(120,\)"),
        (lambda x: np.nan_to_num(x), "cannot be compared: their test sets differ"),
        (lambda x: x.astype(int), "old.npy must hold floating-point numbers .*, got int64"),
        (lambda x: np.full_like(x, np.nan), "every row of .*old.npy holds a NaN"),
        (None, "No such file.*old.npy"),
    ],
)
def test_baselines_that_do_not_fit(tmp_path, change, message):
    words, _, old, _ = _against_baseline(tmp_path, 0.1)
    path = tmp_path / "old.npy"
    path.unlink() if change is None else np.save(
        path, change(np.nan_to_num(old) if message.startswith("old.npy must hold") else old)
    )
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        main.main(["report", *words, f"--out={tmp_path / 'out.html'}"])
    assert not (tmp_path / "out.html").exists()


@pytest.mark.parametrize(
    ("vectors", "labels", "words"),
    [
        (np.eye(6, 4), np.zeros(6, int), "One class: every image is right"),
        (np.eye(6, 4), np.arange(6), "so there are no scores"),
    ],
)
def test_odd_embeddings_are_stated(tmp_path, capsys, vectors, labels, words):
    assert words in _printed(capsys, *_files(tmp_path, vectors, labels))


def test_the_distance_of_embeddings_is_said_and_chosen(tmp_path, capsys, caplog):
    """Random lengths change Euclidean ranks and no ranks by cosine."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(12), 10)
    units = np.eye(12, 16)[labels] + 0.25 * rng.standard_normal((120, 16))
    units /= np.linalg.norm(units, axis=1, keepdims=True)
    lengths = np.geomspace(0.1, 10, 120)[rng.permutation(120), None]

    def report(vectors, *words):
        caplog.clear()
        text = _printed(capsys, *_files(tmp_path, vectors, labels), *words)
        return " ".join(text.split()), text.split("R@1")[1].split()[0]

    text, recall = report(units)
    assert "Ranked by Euclidean distance (all norms are 1, so cosine" in text and not caplog.text
    text, wrong = report(units * lengths)
    assert "Euclidean distance (norms from 0.1 to 10, so cosine gives other ranks)" in text
    assert float(wrong) < float(recall) - 5
    text, same = report(units * lengths, "--distance=cosine")
    assert same == recall and "Ranked by cosine." in text
    np.save(tmp_path / "old.npy", units)
    words = f"--baseline={tmp_path / 'old.npy'}", "--distance=cosine"
    text, _ = report(units * lengths, *words)
    assert "worse" not in text and "+0.0 +0.0 to +0.0" in text and "Ranked by cosine." in text
    text, _ = report(units * lengths, words[0])
    assert "x.npy is ranked by Euclidean distance (norms from 0.1 to 10," in text
    units[[5, 8]], units[9, 1], units[3, 0] = 0, np.inf, 0
    report(units)
    assert "x.npy: 2 rows of zeros (first: row 5): write NaN into" in caplog.text
    assert "x.npy: 1 row with a NaN or an infinity (first: row 9): not in any score" in caplog.text
    with pytest.raises(ValueError, match="--distance: there is no 'cosin': did you mean 'cosine'"):
        report(units, "--distance=cosin")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", "--distance=cosine"], "of --embeddings: leave out --distance$"),
        ([], "report needs the folder of a run"),
        (["--embeddings=x.npy", "--text"], "--embeddings and --labels go together"),
        (["a", "--embeddings=x.npy", "--labels=y.npy", "--text"], "leave out the run"),
        (["a", "b", "--text", "--step=3"], "leave out --step"),
        (["a", "./a", "--text"], "a run is named twice"),
        (
            ["a", "--baseline=old.npy"],
            "a report on a run takes no flags of --embeddings: leave out --baseline$",
        ),
    ],
)
def test_wrong_words(words, message):
    with pytest.raises(ValueError, match=message):
        main.main(["report", *words])


def test_a_long_or_odd_name_stays_on_its_line(runs, tmp_path, capsys):
    names = ("שלום", "a\nb\x1b[31m", "x" * 200)
    for source, name in zip("aba", names, strict=True):
        shutil.copytree(runs / source, tmp_path / name)
    text = _printed(capsys, *(tmp_path / name for name in names), "--text")
    assert "\x1b" not in text and max(map(len, text.splitlines())) <= 120
    assert "שלום" in text and "x" * 60 not in text
