"""The file of a page: the same bytes, safe against foreign text, read back as it was written."""

import dataclasses
import json
import pathlib
import re

import numpy as np
import pytest
from page_cases import HOSTILE, clustered, made

from dmljax import metrics
from dmljax.data.splits import Split
from dmljax.report import facts, page, text


def test_same_facts_give_the_same_bytes_and_are_read_back(tmp_path):
    first, second = made(), made()
    assert page.html_of(first) == page.html_of(second)
    path = page.write(first, tmp_path / "report.html")
    tree = page.read(path)
    assert tree["sheets"] == list(first.sheets) and tree["names"] == list(first.names)
    for field in dataclasses.fields(facts.Items):
        expected = getattr(first.items, field.name)
        if expected is None:
            assert field.name not in tree["items"]
        else:
            np.testing.assert_array_equal(tree["items"][field.name], expected)
    assert tree["title"] == "arrays" and tree["headline"].startswith("R@1 ")


def test_foreign_names_are_no_markup():
    text = page.html_of(made())
    assert HOSTILE not in text and "<img" not in text
    # Only the scripts of the page itself: data, blob, sheets and the program.
    assert text.count("<script") == text.count("</script>") == 3 + len(made().sheets)
    title = page.html_of(made(title="<b>&"))
    assert "<title>&lt;b&gt;&amp;:" in title


def test_nothing_is_fetched_and_the_policy_says_so():
    text = page.html_of(made())
    assert "default-src 'none'" in text and "connect-src" not in text
    program = text.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|\bimport\(|XMLHttpRequest|@import", program)


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "report.html"
    path.write_text("the page before")
    broken = dataclasses.replace(made(), curves={"loss": object()})
    with pytest.raises(TypeError):
        page.write(broken, path)
    assert path.read_text() == "the page before" and [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("change", ["cut", "other", "blob"])
def test_a_file_that_is_no_page_is_refused_in_one_line(tmp_path, change):
    path = page.write(made(items=24), tmp_path / "report.html")
    text = path.read_text()
    broken = {
        "cut": text[: len(text) // 3],
        "other": "<html></html>",
        "blob": re.sub(r'(id="blob">).{40}', r"\1" + "A" * 40, text),
    }[change]
    path.write_text(broken)
    with pytest.raises(page.NotAPage, match="report"):
        page.read(path)


def test_items_agree_with_a_loop():
    embeddings, labels = clustered(60, 7)
    embeddings[5] = np.nan  # an image that could not be read
    labels[11] = 6
    lone = np.flatnonzero(labels == 6)
    labels[lone] = np.where(lone == lone[0], 6, 0)  # a class of one image
    actual = facts.make(embeddings, labels, title="loop").items
    x = embeddings.astype(np.float64)
    for i in range(60):
        others = [j for j in range(60) if j not in (i, 5)]
        order = sorted(others, key=lambda j: (-(x[i] @ x[j]), j))
        ranks = [r + 1 for r, j in enumerate(order) if labels[j] == labels[i]]
        if i == 5 or not ranks:
            assert actual.hits[i] == 2 and actual.first[i] == 0 and actual.best_own[i] == 60
            continue
        assert actual.hits[i] == (ranks[0] == 1) and actual.first[i] == ranks[0]
        assert actual.neighbors[i].tolist() == order[: facts.NEIGHBORS]
        assert actual.best_own[i] == order[ranks[0] - 1]
        cosines = [x[i] @ x[j] for j in order[: facts.NEIGHBORS]]
        np.testing.assert_allclose(actual.similarities[i] / 127.5 - 1, cosines, atol=0.005)
    queries = [i for i in range(60) if i != 5]
    for j in queries:
        finds = [i for i in queries if j in actual.neighbors[i]]
        assert actual.found[j] == len(finds)
        assert actual.found_wrong[j] == sum(labels[i] != labels[j] for i in finds)


def test_queries_and_gallery_keep_their_roles_and_item_numbers():
    embeddings, labels = clustered(40, 5)
    query = np.arange(40) % 3 == 0
    gallery = np.arange(40) % 3 > 0
    split = Split(np.arange(40), labels, tuple("abcde"), query=query, gallery=gallery)
    made_facts = facts.make(embeddings, split, title="protocol")
    items = made_facts.items
    assert items.roles.tolist() == np.where(query, 1, 2).tolist()
    x = embeddings.astype(np.float64)
    for i in np.flatnonzero(query):
        order = sorted(np.flatnonzero(gallery), key=lambda j: (-(x[i] @ x[j]), j))
        assert items.neighbors[i].tolist() == order[: facts.NEIGHBORS]
    assert (items.hits[gallery] == 2).all() and (items.neighbors[gallery] == 40).all()
    assert items.found[query].sum() == 0 and items.found.sum() == facts.NEIGHBORS * query.sum()


def test_scores_have_the_intervals_of_metrics():
    embeddings, labels = clustered(96, 12)
    tiles = {t["name"]: t for t in facts.make(embeddings, labels, title="t").scores["tiles"]}
    values = metrics.per_query(embeddings, labels, ks=(1,))
    for name, tile in tiles.items():
        assert tile["value"] == pytest.approx(values[name].mean())
        interval = metrics.interval(values[name], groups=labels)
        assert (tile["low"], tile["high"]) == pytest.approx(interval, abs=1e-6)


def test_a_fault_in_one_section_costs_that_section_only():
    def fails(rows):
        raise RuntimeError("masks are broken\nsecond line")

    broken = made(inside_fn=fails, are_classes_new=False)
    assert broken.headline.endswith("on known classes")
    assert broken.faults == [facts.Fault("inside", "RuntimeError: masks are broken")]
    assert broken.inside == [] and broken.scores is not None and broken.classes is not None


def test_pictures_that_cannot_be_read_are_left_out():
    def read(item):
        if item % 2:
            raise OSError("moved")
        return np.zeros((8, 8, 3), np.uint8)

    items = made(read_fn=read).items
    assert (items.cells[1::2] == 65535).all() and (items.cells[::2] < 96).all()

    def moved(item):
        raise OSError("moved")

    page_without = made(read_fn=moved)
    assert page_without.items.cells is None and not page_without.sheets and not page_without.faults


def test_looks_say_nothing_where_there_is_nothing_to_say():
    embeddings, labels = clustered(96, 12, spread=0.01)
    perfect = facts.make(embeddings, labels, title="perfect")
    assert perfect.looks == []
    assert not json.dumps(perfect.check or {}).count("suspects")


@pytest.mark.parametrize(
    "labels, message", [(np.zeros(3, int), "one row"), (np.zeros((8, 2), int), "labels must have")]
)
def test_bad_arrays_are_refused(labels, message):
    with pytest.raises(ValueError, match=message):
        facts.make(np.zeros((8, 2), np.float32), labels, title="bad")


def _leaking_case():
    """Makes facts with equal pictures of two labels, a training image, hubs and wrong labels."""
    embeddings, labels = clustered(items=240, classes=12, dimension=16, spread=0.15)
    rng = np.random.default_rng(5)
    images = rng.integers(0, 256, (240, 24, 24, 3)).astype(np.uint8)
    labels = labels.copy()
    labels[[13, 29]] = [4, 9]  # suspected labels: the embedding follows the picture
    embeddings[40] = embeddings[41]  # classes 4 and 5, one picture, not byte for byte the same
    images[41] = images[40] // 2 + 20
    hub = embeddings[[0, 1, 2, 3]].sum(axis=0)
    crowd = np.arange(48, 72)  # of all classes, around one image of class 0
    embeddings[crowd] = hub + 0.3 * rng.standard_normal((24, 16))
    embeddings[60] = hub
    embeddings /= np.linalg.norm(embeddings, axis=1, keepdims=True)
    training = {
        "embeddings": embeddings[[100, 101]],
        "labels": np.array([0, 1]),
        "names": ("walrus", "heron"),
        "read_fn": lambda row: images[[100, 200]][row],  # image 100 alone has the same pixels
        "total": 5,
    }
    split = Split(np.arange(240), labels, tuple(f"kind-{c}" for c in range(12)))
    return facts.make(
        embeddings.astype(np.float32),
        split,
        title="planted",
        files=[f"f{i:03}.png" for i in range(240)],
        read_fn=lambda i: images[i],
        training_fn=lambda: training,
    )


def test_the_page_says_how_one_threshold_suits_the_classes():
    numbers = {name: value for name, value, _ in made(items=240).embedding["numbers"]}
    embeddings, labels = clustered(items=240)
    classes = metrics.class_histograms(embeddings, labels)
    assert numbers["Threshold inconsistency"] == f"{metrics.opis(classes):.4f}"
    low, high = np.quantile(metrics.class_thresholds(classes, 1e-2), [0.1, 0.9])
    assert numbers["Thresholds of classes"] == f"{low:.2f} to {high:.2f}"
    near = metrics.neighborhoods(embeddings, labels)
    threshold = metrics.threshold_at_refusal(near, 0.05)
    share = metrics.stranger_rates(near, threshold).strangers_refused
    assert numbers["Strangers refused"] == f"{100 * share:.1f} % at cosine {threshold:.2f}"


def test_the_text_has_the_main_numbers_of_the_page(tmp_path, capsys):
    case = _leaking_case()
    tree = page.read(page.write(case, tmp_path / "report.html"))
    text.show(text.of_facts(facts.from_tree(tree)))
    printed = " ".join(capsys.readouterr().out.split())
    expected = [tree["title"], tree["headline"], tree["scores"]["note"]]
    for tile in tree["scores"]["tiles"]:
        value, low, high = (f"{100 * tile[key]:.1f}" for key in ("value", "low", "high"))
        expected.append(f"{tile['name']} {value} {low} to {high}")
    assert [words for words in expected if " ".join(words.split()) not in printed] == []


def test_the_page_has_the_planted_findings():
    check = _leaking_case().check
    assert {s["item"] for s in check["suspects"]} >= {13, 29}
    assert any({d["a"], d["b"]} == {40, 41} for d in check["duplicates"])
    assert [(leak["item"], leak["train_class"]) for leak in check["leaks"]] == [(100, "walrus")]
    assert check["hubs"]


def test_numbers_in_sentences_come_from_the_facts():
    """Forbids texts that repeat the counts of neighbors or the level, which are data."""
    words = r"(?i)\b(ten|eight|10|8)\b( \w+)? nearest|nearest (ten|eight|10|8)\b|\b95 ?%"
    for path in pathlib.Path(facts.__file__).parent.iterdir():
        if path.suffix in (".py", ".js", ".html"):
            assert not re.search(words, path.read_text()), path
