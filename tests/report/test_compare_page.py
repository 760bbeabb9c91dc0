"""The page that compares runs, pages of embeddings of other programs, and pages in notebooks."""

import html
import json
import re

import browser
import numpy as np
import pytest
from page_cases import clustered, colored
from PIL import Image
from processes import command

from dmljax import main, report
from dmljax.data.splits import Split
from dmljax.report import compare_page, comparison, facts, page, scores_file


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Makes folders of two finished runs; the second one confuses more."""
    root = tmp_path_factory.mktemp("runs")
    folders = {}
    for name, spread in (("first", 0.5), ("second", 1.3)):
        embeddings, labels = clustered(96, 12, spread=spread)
        split = Split(np.zeros((96, 4, 4, 3), np.uint8), labels, tuple(map(str, range(12))))
        folder = root / name
        folder.mkdir()
        scores_file.write(folder, scores_file.score(embeddings, split, data="d", step=3))
        (folder / "config.json").write_text(json.dumps({"steps": 3, "rate": spread}))
        (folder / "metrics.jsonl").write_text('{"step": 3, "test/R@1": 0.5}\n')
        content = facts.make(embeddings, labels, title=name, read_fn=colored)
        page.write(content, folder / "report.html")
        folders[name] = folder
    return folders


def test_the_comparison_lists_what_a_loop_over_queries_finds(runs):
    section = compare_page.facts_of(runs).comparison
    assert section["config"] == [["rate", "0.5", "1.3"]]
    first, second = (scores_file.read(folder) for folder in runs.values())
    only_first = np.flatnonzero((first.first == 1) & (second.first != 1))
    only_second = np.flatnonzero((first.first != 1) & (second.first == 1))
    change = section["changes"][0]
    assert change["lost_count"] == len(only_first) > 5
    assert change["won_count"] == len(only_second)
    _, counts = np.unique(first.labels[only_first], return_counts=True)
    assert len(change["lost"]) == np.minimum(counts, 4).sum()
    assert [curve["name"] for curve in section["curves"]] == ["first", "second"]
    pages = [page.read(folder / "report.html")["items"] for folder in runs.values()]
    for entry in change["lost"]:
        assert entry["item"] in only_first
        assert entry["found"] == [int(p["neighbors"][entry["item"], 0]) for p in pages]
    cell = section["rows"][0]["cells"][1]
    assert cell["verdict"] == "worse" and cell["low"] < cell["difference"] < cell["high"] < 0
    assert [c["is_best"] for c in section["rows"][0]["cells"]] == [True, False]


@pytest.mark.parametrize("n", [84, 108])
def test_a_page_of_other_images_shows_none(runs, n):
    """A page may be older than the scores of its run. Unreadable images are on no map."""
    embeddings, labels = clustered(n, 12)
    embeddings[5] = np.nan
    pages = {"first": facts.from_tree(page.read(runs["first"]))}
    pages["second"] = facts.make(embeddings, labels, title="second")
    section = compare_page.of_pages(pages, comparison.read(runs)).comparison
    lost = section["changes"][0]["lost"]
    assert lost and all(entry["found"][1] == 96 for entry in lost)
    assert [len(one["x"]) for one in section["maps"]] == [96, n - 1]


def test_the_maps_of_both_runs_are_side_by_side(runs, tmp_path):
    written = page.write(compare_page.facts_of(runs), tmp_path / "maps.html")
    maps = page.read(written)["comparison"]["maps"]
    assert [one["name"] for one in maps] == list(runs)
    for one, folder in zip(maps, runs.values(), strict=True):
        items = page.read(folder / "report.html")["items"]
        for field in ("x", "y", "hits"):
            np.testing.assert_array_equal(one[field], items[field])
        recall = scores_file.read(folder).values["R@1"].mean()
        assert np.isclose((np.asarray(one["hits"]) == 1).mean(), recall)


def test_page_and_text_show_one_comparison(runs, capsys):
    section = compare_page.facts_of(runs).comparison
    assert section["rows"][0]["cells"][1]["p"] == "< 0.001"
    assert main.main(["report", *map(str, runs.values()), "--text"]) == 0
    text = capsys.readouterr().out
    row = next(line.split() for line in text.splitlines() if line.split()[:1] == ["second"])
    assert row[-3:] == ["<", "0.001", "worse"]
    plain = " ".join(text.split())
    assert all(x in plain for x in [*section["note"].split(". "), *section["lines"]])
    section = compare_page.facts_of(runs, fields=[["rate", "low", "high"]]).comparison
    assert section["config"] == [["rate", "low", "high"]]
    assert section["config_title"] == "About the runs"


def test_the_command_writes_the_comparison_and_says_what_is_missing(runs, tmp_path):
    assert main.main(["report", *map(str, runs.values())]) == 0
    text = (runs["first"] / "comparison.html").read_text()
    assert "<title>first and second: R@1 " in text and ", worse</title>" in text
    assert page.read(runs["first"] / "comparison.html")["comparison"]["config"] == [
        ["rate", "0.5", "1.3"]
    ]
    empty = tmp_path / "empty"
    empty.mkdir()
    done = command("report", empty, runs["first"], cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1


@pytest.mark.browser
def test_the_comparison_in_a_browser(runs):
    if reason := browser.missing():
        if browser.REQUIRED:
            pytest.fail(reason)
        pytest.skip(reason)
    content = compare_page.facts_of(runs)
    # As of a comparison over fewer classes than a range needs.
    content.comparison["rows"][-1]["cells"][1] |= {"low": None, "high": None, "p": "-"}
    path = page.write(content, runs["first"] / "shown.html")
    complaints = []
    with browser.chromium() as chromium:
        opened = chromium.new_page(viewport={"width": 390, "height": 800})
        opened.on("console", lambda message: complaints.append(message.text))
        opened.on("pageerror", lambda error: complaints.append(str(error)))
        opened.goto(path.as_uri())
        opened.wait_for_selector("html[data-ready=true]")
        ids = opened.evaluate("[...document.querySelectorAll('main section')].map((s) => s.id)")
        assert ids[:2] == ["compare", "scores"]
        text = opened.inner_text("#compare")
        assert "worse" in text and "right only in first" in text
        assert text.count(", no range") == 1 and "0.0 to 0.0" not in text
        for width in (320, 390):
            opened.set_viewport_size({"width": width, "height": 800})
            assert opened.evaluate("document.documentElement.scrollWidth") == width
        for name in runs:
            drawn = opened.locator(f"#compare-maps svg[aria-label='Map of {name}'] path")
            shapes = drawn.evaluate_all("paths => paths.map((p) => p.getAttribute('d'))")
            assert sum(shape.count("M") for shape in shapes) == 96
            assert opened.locator(f"#compare-maps svg[aria-label='Map of {name}']").bounding_box()
        opened.set_viewport_size({"width": 1200, "height": 800})
        cards = opened.locator("#compare-maps .card").all()
        assert len({card.bounding_box()["y"] for card in cards}) == 1
        opened.locator("#compare .thumb").first.click()
        assert opened.evaluate("document.getElementById('panel').open")
    assert not complaints


def test_embeddings_of_another_program_get_a_page_with_their_images(tmp_path, monkeypatch, capsys):
    embeddings, labels = clustered(24, 4)
    np.save(tmp_path / "x.npy", embeddings)
    (tmp_path / "labels.txt").write_text("".join(f"name {c}\n" for c in labels))
    for item in range(24):
        file = tmp_path / "photos" / "deep" / f"{item:03}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(colored(item)).save(file)
    words = ["report", "--embeddings=x.npy", "--labels=labels.txt"]
    monkeypatch.chdir(tmp_path)
    assert main.main([*words, "--images=photos", "--out=elsewhere.html"]) == 0
    assert re.fullmatch(r"elsewhere.html: \d+\.\d MB\n", capsys.readouterr().out)
    tree = page.read(tmp_path / "elsewhere.html")
    assert tree["files"][7] == "deep/007.png" and len(tree["sheets"]) == 1
    expected = facts.make(embeddings, labels, title="x").items
    np.testing.assert_array_equal(tree["items"]["neighbors"], expected.neighbors)
    (tmp_path / "photos" / "deep" / "003.png").unlink()
    done = command(*words, "--images=photos", cwd=tmp_path)
    assert done.returncode == 2 and "holds 23 images, but there are 24 embeddings" in done.stderr
    assert done.stderr.count("\n") == 1 and not (tmp_path / "report.html").exists()


def test_a_notebook_shows_the_page_in_a_frame(runs):
    with pytest.raises(FileNotFoundError, match="dmljax report"):
        report.show(runs["second"] / "nothing")
    shown = report.show(runs["second"], height=700)._repr_html_()
    assert shown.startswith("<iframe srcdoc=") and "height:700px" in shown
    document = html.unescape(shown.partition('srcdoc="')[2].partition('"')[0])
    assert document == (runs["second"] / "report.html").read_text()


@pytest.mark.parametrize(
    ("groups", "unread", "reason"),
    [
        ([3, 3, 4, 4], [], "no image has another one of its class outside of its group"),
        (None, [0, 3], "no image has another one of its class"),
    ],
)
def test_models_of_images_without_positives_say_why(groups, unread, reason):
    marks = {} if groups is None else {"groups": np.array(groups)}
    images = Split([b""] * 4, np.array([0, 0, 1, 1]), ("a", "b"), **marks)
    vectors = np.eye(4, dtype=np.float32)
    vectors[unread] = np.nan
    with pytest.raises(ValueError, match=f"^there is nothing to score: {reason}"):
        compare_page.compare({"old": vectors, "new": vectors}, images)
