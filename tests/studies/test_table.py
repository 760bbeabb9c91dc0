"""What a table says: intervals, marks, tests, counts; in every format."""

import csv
import dataclasses
import html.parser
import io
import re

import numpy as np
import pytest
from study_files import finished, write_study

from dmljax import metrics
from dmljax.files.run_folder import Chosen, Evaluated
from dmljax.studies import printing, study_file, table
from dmljax.studies.outcomes import Outcome
from dmljax.studies.plan import PlannedRun


def _result(values, *, uses_test=False, candidates=1, rule=None, evaluations=(), pretraining=None):
    split, _, score = (rule or "").partition("/")
    scores = {name: value / 100 for name, value in values.items()}
    chosen = Chosen(6, score or None, split or None, candidates, "", uses_test)
    result = finished(scores, "0" * 64, chosen=chosen, evaluations=evaluations)
    return dataclasses.replace(result, pretraining=pretraining)


def _table(folder, values_by_row, *, outcomes=(), results=None, name_of_score="R@1", **fields):
    """The table of a study whose runs have these values of a score, by row and seed."""
    rows = {name: {"method.dim": 4 + i} for i, name in enumerate(values_by_row)}
    fields = {"rows": rows, "scores": [name_of_score], "seeds": 5} | fields
    study = study_file.read(str(write_study(folder, **fields)))
    runs = []
    for row, values in values_by_row.items():
        for i in range(5):
            folds = range(fields["folds"]) if fields.get("folds") else [None]
            for fold in folds:
                planned = PlannedRun(row, i, fold, "tiny.py", (), f"{row}{i}{fold}")
                outcome = dict(outcomes).get((row, i), Outcome("waiting"))
                is_over = i < len(values) and (fold is None or fold < len(values[i]))
                if is_over and (row, i) not in dict(outcomes):
                    value = values[i][fold] if fold is not None else values[i]
                    name = name_of_score.removeprefix("test/")
                    scores = {f"test/{name}": value, f"val/{name}": value, "val/R@1": value}
                    result = _result(scores, **(results or {}))
                    outcome = Outcome("finished", result=result)
                runs.append(table.Run(planned, outcome, {}))
    return table.make(study, runs)


A, B = [70.0, 71.0, 69.5, 70.5, 70.2], [71.4, 72.1, 71.0, 71.6, 71.9]
C = [70.4, 70.2, 70.3, 69.9, 70.8]
COMPARED = {"baseline": "a", "test": "paired"}


def _cells(text, row):
    line = next(line for line in text.splitlines() if line.startswith(f"| {row} "))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_one_two_and_more_runs(tmp_path):
    text = printing.as_markdown(
        _table(tmp_path, {"one": A[:1], "two": A[:2], "all": A, "none": []})
    )
    assert _cells(text, "one")[1:] == ["70.0 (1 run)", "1 of 5"]
    assert _cells(text, "two")[1:] == ["70.0, 71.0", "2 of 5"]
    half = 2.776 * np.std(A, ddof=1) / 5**0.5
    assert _cells(text, "all")[1:] == [f"70.2 ± {half:.1f}", "5"]
    assert _cells(text, "none")[1:] == ["-", "0 of 5"]
    assert "95 % Student interval over seeds" in text and "the last step counts" in text
    narrow = printing.as_markdown(_table(tmp_path, {"all": [70.0, 70.01, 70.02, 70.0, 70.01]}))
    assert _cells(narrow, "all")[1] == "70.01 ± 0.01"


def test_differences_are_those_of_the_declared_test(tmp_path):
    content = _table(tmp_path, {"a": A, "b": B, "c": C}, **COMPARED)
    text = printing.as_markdown(content)
    (_, b, c) = content.rows
    p = metrics.holm([metrics.paired_difference(x, A).p for x in (B, C)])
    assert [row.comparisons["R@1"].p for row in (b, c)] == p and p[0] < 0.05 < p[1]
    scores, differences = text.split("Differences to a")
    assert "adjusted by Holm" in differences and "Student" in differences
    assert _cells(scores, "b")[1].startswith("**71.6 ±") and "*" not in _cells(scores, "c")[1]
    assert _cells(differences, "b")[1].startswith("**+1.4 [") and "wins 5 of 5" in differences
    assert _cells(differences, "c")[1].endswith("wins 3 of 5: not resolved")
    assert "equal" not in _cells(differences, "c")[1]
    # "with n = 5 and sd ... this study can see ... points", from the measured deviations.
    deviations = [np.std(np.subtract(x, A), ddof=1) for x in (B, C)]
    sd = float(np.sqrt(np.mean(np.square(deviations))))
    points = metrics.visible_difference(sd, n=5, paired=True)
    sentence = f"with n = 5 and sd {sd:.1f} of the paired differences this study can see"
    assert f"{sentence} {points:.1f} points" in text
    first = metrics.visible_difference(sd, n=5, paired=True, comparisons=2)
    assert f"({first:.1f} for the first of 2 rows)" in text
    uneven = _table(tmp_path, {"a": A, "b": B[:4], "c": C}, **COMPARED)
    assert "with n = 4 and sd" in printing.as_markdown(uneven)
    welch = _table(tmp_path, {"a": A, "b": B[:4]}, **COMPARED | {"test": "welch"})
    compared = welch.rows[1].comparisons["R@1"].difference
    assert np.isclose(compared.p, metrics.welch_difference(B[:4], A).p)


@pytest.mark.parametrize("test", ["paired", "welch"])
def test_a_difference_without_spread_is_not_tested(tmp_path, test):
    values = {"a": [75.0] * 5, "same": [75.0 - 100 / 44] * 5}
    study_table = _table(tmp_path, values, baseline="a", test=test)
    assert not study_table.rows[1].comparisons["R@1"].is_resolved
    text = printing.as_markdown(study_table)
    assert "-2.27, wins 0 of 5; no spread between runs: no test" in text
    assert not any(words in text for words in ("**", "can see", "nan", "p <"))
    assert "class=unresolved" in printing.as_html(study_table)
    more = _table(tmp_path, values | {"b": [x + 5 for x in B]}, baseline="a", test=test)
    tested = more.rows[2].comparisons["R@1"]
    assert tested.p == tested.difference.p  # the row without a test does not count for Holm


def test_every_row_has_a_baseline_of_its_own(tmp_path):
    """Holm's adjustment is over all comparisons of a column, whatever their baselines."""
    values = {"a": A, "b": B, "c": C, "d": [71.0, 70.3, 71.2, 70.1, 71.3]}
    rows = {"a": {}, "b": {"baseline": "a"}, "c": {}, "d": {"baseline": "c"}}
    rows = {name: row | {"method.dim": 4 + i} for i, (name, row) in enumerate(rows.items())}
    content = _table(tmp_path, values, rows=rows, test="paired")
    p = metrics.holm([metrics.paired_difference(x, y).p for x, y in ((B, A), (values["d"], C))])
    assert [row.comparisons["R@1"].p for row in (content.rows[1], content.rows[3])] == p
    assert not content.rows[0].comparisons and not content.rows[2].comparisons
    text = printing.as_markdown(content)
    _, differences = text.split("Differences (")
    assert _cells(differences, "b minus a")[1].startswith("**+1.4 [")
    assert "| d minus c " in differences and "| c " not in differences
    # A row that opts out of the baseline of the study.
    rows = {"a": {}, "b": {"method.dim": 5}, "c": {"method.dim": 6, "baseline": None}}
    content = _table(tmp_path, {"a": A, "b": B, "c": C}, rows=rows, **COMPARED)
    assert content.rows[1].comparisons["R@1"].p == metrics.paired_difference(B, A).p
    assert not content.rows[2].comparisons and "Differences to a (" in printing.as_markdown(content)


@pytest.mark.parametrize("score", ["class_deviation", "test/spread"])
def test_less_is_better_where_it_is_declared(tmp_path, score):
    """By the library for its own score, by the study for another one."""
    declared = {"less_is_better": [score]} if score == "test/spread" else {}
    content = _table(
        tmp_path, {"a": B, "b": A, "c": C}, name_of_score=score, **COMPARED, **declared
    )
    scores, differences = printing.as_markdown(content).split("Differences to a")
    assert _cells(scores, "b")[1].startswith("**70.2 ±")
    assert _cells(differences, "b")[1].startswith("**-1.4 [")
    assert "wins 5 of 5" in _cells(differences, "b")[1]
    if declared:
        plain = _table(tmp_path, {"a": B, "b": A}, name_of_score=score, **COMPARED)
        assert "**70.2" not in printing.as_markdown(plain)


def test_a_rule_takes_the_least_of_a_score_of_which_less_is_better():
    steps = [Evaluated(s, {"test/class_deviation": v}) for s, v in ((2, 0.9), (4, 0.4))]
    result = _result({"test/R@1": 60.0}, evaluations=steps)
    scores, _, _ = table.chosen_scores(result, "test/class_deviation")
    assert scores["test/class_deviation"] == 0.4


def test_folds_have_the_corrected_test(tmp_path):
    values = {"a": [A[:4]], "b": [B[:4]]}
    fields = {"folds": 4, "baseline": "a", "test": "folds", "scores": ["val/R@1"], "seeds": 1}
    compared = _table(tmp_path, values, **fields).rows[1].comparisons["val/R@1"].difference
    expected = metrics.fold_difference(B[:4], A[:4], test_per_train=1 / 3)
    np.testing.assert_allclose(compared[:5], expected[:5])
    # Otherwise the unit is the mean over folds of a seed, and unfinished seeds do not count.
    content = _table(tmp_path, {"a": [A[:4], B[:4], C[:3]]}, folds=4)
    assert list(content.rows[0].cells["R@1"].values.values()) == [np.mean(A[:4]), np.mean(B[:4])]


def test_marks_of_choice_failure_and_collapse(tmp_path):
    chosen = {"uses_test": True, "candidates": 70, "rule": "test/R@1"}
    failed = {("b", 4): Outcome("diverged", "the loss is NaN at step 3")}
    shorter = _result({"test/R@1": A[0]}, **chosen | {"candidates": 60})
    content = _table(
        tmp_path,
        {"a": A, "b": B[:4]},
        outcomes=failed | {("a", 0): Outcome("finished", result=shorter)},
        results=chosen,
        collapsed={"R@1": 0.705},
        published={"a": {"R@1": 69.4}},
        published_from="1 run, test-chosen",
        **COMPARED,
    )
    text = printing.as_markdown(content)
    assert _cells(text, "a")[1].endswith("†") and _cells(text, "b")[1].strip("*").endswith("†‡")
    assert _cells(text, "a")[2:] == ["69.4", "5, 3 collapsed"]
    assert _cells(text, "b")[3] == "4 of 5, 1 failed"
    assert "Failed: b, seed 4: the loss is NaN at step 3" in text
    assert "among 70 evaluations" in text
    assert "gains 2.4 standard deviations" in text
    assert "1 run, test-chosen. These values are not part of any test" in text
    assert "the step is chosen by test/R@1" in text
    held_out = _table(tmp_path, {"a": A}, results={"rule": "val/R@1", "candidates": 9})
    assert "†" not in printing.as_markdown(held_out)
    nothing = _table(
        tmp_path, {"a": []}, outcomes={("a", i): Outcome("failed", "x") for i in range(5)}
    )
    assert _cells(printing.as_markdown(nothing), "a")[1:] == ["failed", "0 of 5, 5 failed"]


def test_a_rule_reads_the_evaluations_of_other_runs(tmp_path):
    """The first of equals, as in the train loop."""
    numbers = [(2, 0.5, 0.3), (4, 0.6, 0.4), (6, 0.6, 0.2)]
    steps = [Evaluated(s, {"test/R@1": t, "val/R@1": v}) for s, t, v in numbers]
    start = Evaluated(0, {"test/R@1": 0.7, "val/R@1": 0.5})  # before the training
    result = _result({"test/R@1": 60.0}, evaluations=[start, *steps])
    for rule, score, uses_test, candidates in (
        ("test/R@1", 0.4, True, 3),
        ("val/R@1", 0.4, False, 3),
        ("last", 0.2, False, 1),
    ):
        scores, uses, count = table.chosen_scores(result, rule)
        assert (scores["val/R@1"], uses, count) == (score, uses_test, candidates)
    # A run that reloaded by test scores has read them, whatever the rule.
    chosen = dataclasses.replace(result.chosen, uses_test=True)
    result = dataclasses.replace(result, chosen=chosen)
    assert not table.chosen_scores(result, "last")[1]
    for rule in ("last", "val/R@1"):
        assert table.chosen_scores(result, rule, reloads=True)[1]
    with pytest.raises(ValueError, match=r"no evaluation has this score; they have .*test/R@1"):
        table.chosen_scores(result, "val/NMI")


def test_provenance(tmp_path):
    content = _table(tmp_path, {"a": A}, results={"pretraining": "/home/somebody/bn.safetensors"})
    text = printing.as_markdown(content)
    assert "Pretraining: bn.safetensors." in text and "somebody" not in text
    text = printing.as_markdown(_table(tmp_path, {"a": A}))
    assert "; 1 finished run." in printing.as_markdown(_table(tmp_path, {"a": A[:1]}))
    for words in ("; 5 finished runs.", "digest ", "Steps: 6", "abababababab", "(dirty)"):
        assert words in text
    assert "test 30 images of 3 classes" in text and "Pretraining: none" in text
    assert f"{len(A)}.0 minutes of runs" in text  # `finished` takes a minute


def test_ensembles_are_paired_with_the_seeds_of_other_rows(tmp_path):
    rows = {"net": {}, "nets": {"runs_of": "more", "join": 2}, "more": {"seeds": 10, "steps": 9}}
    content = _table(tmp_path, {"net": A, "nets": B}, rows=rows, baseline="net", test="paired")
    assert content.rows[1].cells["R@1"].values == {(i, None): value for i, value in enumerate(B)}
    assert content.rows[1].comparisons["R@1"].p == metrics.paired_difference(B, A).p


def test_csv_has_one_line_for_every_run(tmp_path):
    content = _table(tmp_path, {"a": A, "b": B[:3]})
    rows = list(csv.DictReader(io.StringIO(printing.as_csv(content))))
    assert [float(r["test/R@1"]) for r in rows if r["row"] == "a"] == [x / 100 for x in A]
    assert [r["state"] for r in rows if r["row"] == "b"] == ["finished"] * 3 + ["waiting"] * 2
    # Nobody sees the test scores of the trials of a search.
    rows = {"a": {"best_of": ["trial"], "by": "val/R@1"}, "trial": {"seeds": [5, 6, 7, 8, 9]}}
    content = _table(tmp_path, {"a": A, "trial": B}, rows=rows)
    assert [row.name for row in content.rows] == ["a"]
    assert "a: the settings of the best of 1 trials, by val/R@1" in content.notes[0]
    trials = list(csv.DictReader(io.StringIO(printing.as_csv(content))))[5:]
    assert [r["test/R@1"] for r in trials] == [""] * 5
    assert [float(r["val/R@1"]) for r in trials] == [x / 100 for x in B]


def test_html_has_a_dot_for_every_seed(tmp_path):
    class Counter(html.parser.HTMLParser):
        tags, titles = (), ()

        def handle_starttag(self, tag, attrs):
            self.tags += (tag,)

        def handle_data(self, data):
            self.titles += (data,)

    text = printing.as_html(_table(tmp_path, {"a": A, "<b>": B}, **COMPARED))
    counter = Counter()
    counter.feed(text)
    assert counter.tags.count("circle") == 10 and "b" not in counter.tags
    assert "seed 1: 72.10" in counter.titles and "http" not in text
    assert counter.tags.count("table") == 2
    dots = re.findall(r" cx=(\S+) .*?: (\d+\.\d+)</title>", text)
    places, values = np.array(dots, float).T
    assert np.corrcoef(places, values)[0, 1] > 0.999


def test_latex_escapes(tmp_path):
    text = printing.as_latex(
        _table(tmp_path, {"a_1 & 50 %": A, "b": B}, baseline="b", test="welch")
    )
    assert r"a\_1 \& 50 \%" in text and r"$\pm$" in text and text.count(r"\toprule") == 2
