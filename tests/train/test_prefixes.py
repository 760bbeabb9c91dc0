"""Runs whose embeddings have prefixes: scores, page, files, bundle."""

import shutil

import forged
import numpy as np
import pytest
from system import METHODS, blobs, photos, tiny

from dmljax import bundle
from dmljax.bundle import exporting
from dmljax.config.build import build
from dmljax.files import run_folder as results
from dmljax.main import main
from dmljax.report import page
from dmljax.runs import folder as run_folder
from dmljax.runs import training
from dmljax.train.evaluation import Evaluator

METHOD = {"name": "proxies", "dim": 6, "prefixes": [2, 4]}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prefixes")
    config = tiny(folder, **METHODS["proxies"] | {"method": METHOD}, pictures="page")
    training.run(config, folder / "run")
    exporting.export(folder / "run", folder / "tiny.bundle", batch_sizes=(8,))
    return folder / "run"


def _cut(x, dim):
    return np.stack([row[:dim] / np.sqrt(sum(v * v for v in row[:dim])) for row in x])


def _naive(x, labels):
    """R@1 and MAP@R by a loop."""
    hits, precisions = [], []
    for i in range(len(x)):
        others = [j for j in range(len(x)) if j != i]
        others.sort(key=lambda j, i=i: -float(x[i] @ x[j]))
        same = [labels[j] == labels[i] for j in others]
        r = sum(same)
        hits.append(same[0])
        precisions.append(sum(same[k] * sum(same[: k + 1]) / (k + 1) for k in range(r)) / r)
    return np.mean(hits), np.mean(precisions)


def test_every_prefix_is_scored_and_on_the_page(run):
    loaded, state = run_folder.reopen(run)
    x = Evaluator(loaded).embeddings(state, loaded.test)["embedding"]
    scores = results.read(run).scores
    for dim, before in ((2, "prefix_2/"), (4, "prefix_4/"), (6, "")):
        recall, precision = _naive(_cut(x.astype(np.float64), dim), loaded.test.labels)
        assert scores[f"test/{before}R@1"] == pytest.approx(recall, abs=1e-6)
        assert scores[f"test/{before}MAP@R"] == pytest.approx(precision, abs=1e-6)
    facts = page.read(run)["prefixes"]
    assert facts["widths"] == [2, 4, 6] and [s["name"] for s in facts["scores"]] == ["R@1", "MAP@R"]
    expected = [scores[f"test/{before}R@1"] for before in ("prefix_2/", "prefix_4/", "")]
    np.testing.assert_allclose(facts["scores"][0]["values"], 100 * np.array(expected), rtol=1e-6)


def test_the_score_of_a_prefix_can_choose_the_step(run):
    folder = run.parent
    config = tiny(folder, **METHODS["proxies"] | {"method": METHOD}, held_out=0.5)
    assert build(config | {"select": "val/prefix_2/MAP@R"}).selection.score == "prefix_2/MAP@R"
    with pytest.raises(ValueError, match="has no score 'prefix_3/R@1'"):
        build(config | {"select": "val/prefix_3/R@1"})


def test_a_bundle_gives_its_prefixes_and_its_card_lists_their_scores(run):
    folder = run.parent / "tiny.bundle"
    model = bundle.load(folder)
    assert model.prefixes == (2, 4)
    with np.load(blobs(run.parent)) as arrays:
        images = list(arrays["images"][:3])
    whole, short = model.embed(images), model.embed(images, prefix=2)
    np.testing.assert_allclose(short, _cut(whole, 2), atol=1e-6)
    assert short.dtype == np.float32
    with pytest.raises(ValueError, match=r"tiny.bundle was trained with the prefixes 2, 4"):
        model.embed(images, prefix=3)
    scores, card = results.read(run).scores, (folder / "README.md").read_text()
    for dim, before in ((2, "prefix_2/"), (4, "prefix_4/"), (6, "")):
        values = (f"{100 * scores[f'test/{before}{name}']:.1f}" for name in ("R@1", "MAP@R"))
        assert f"| {dim} | {4 * dim} | {' | '.join(values)} |" in card


def test_a_prefix_that_was_not_trained_is_refused(run, source, tmp_path):
    words = [f"--out={tmp_path / 'out'}", "--prefix=3"]
    with pytest.raises(ValueError, match="prefix=3: the run was trained with the prefixes 2, 4"):
        main(["embed", str(run), *words])
    with pytest.raises(ValueError, match="prefix=3: the run was trained without prefixes"):
        main(["embed", str(source), *words])
    shutil.copytree(run.parent / "tiny.bundle", tmp_path / "plain.bundle")
    forged.change_manifest(tmp_path / "plain.bundle", prefixes=[])
    images = f"--images={photos(tmp_path)}"
    with pytest.raises(ValueError, match=r"prefix=3: .*was trained without prefixes: leave it out"):
        main(["embed", str(tmp_path / "plain.bundle"), images, *words])
    assert not (tmp_path / "out").exists()
