"""The page of a run: what it may not tell, and what it is made of when files are damaged."""

import base64
import gzip
import os
import re
import shutil

import pytest
from system import photos, tiny

from dmljax import main
from dmljax.report import page
from dmljax.runs import folder, training
from dmljax.runs import page as run_page


@pytest.fixture(scope="module")
def run_of_photos(source, tmp_path_factory):
    """A run on image files, and the folder of these files."""
    folder = tmp_path_factory.mktemp("private")
    images = photos(folder)
    dataset = {"name": "folder", "root": str(images), "split": 0.5}
    start = {"name": str(source), "takes": "backbone"}
    training.run(tiny(folder, dataset=dataset, pictures="page", start=start), folder / "run")
    return folder / "run", images


def test_the_page_holds_no_path_of_this_machine(run_of_photos):
    run, images = run_of_photos
    text = (run / page.FILE).read_text()
    blob = re.search(r'<script type="text/plain" id="blob">(.*?)</script>', text, re.S)[1]
    assert " on unseen classes" in text
    everything = text.encode() + gzip.decompress(base64.b64decode(blob))
    assert b"c4/" in everything  # files are named below the folder of the data
    for word in (str(images.parent), os.getcwd(), os.path.expanduser("~/")):
        assert word.encode() not in everything, word


def test_a_data_set_that_has_changed_since_the_training_is_refused(tmp_path):
    """Other data can be scored on purpose, but the page of a run is of its own data."""
    images = photos(tmp_path)
    lines = [f"{p.relative_to(images)},{p.parent.name}" for p in sorted(images.rglob("*.png"))]
    table = tmp_path / "photos" / "table.csv"
    table.write_text("\n".join(["path,label", *lines]))
    dataset = {"name": "table", "path": str(table), "split": 0.5}
    training.run(tiny(tmp_path, dataset=dataset, steps=1), tmp_path / "run")
    table.write_text(table.read_text().replace("060.png,c7", "060.png,c6"))
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    run, other_data = str(tmp_path / "run"), f"--config.dataset.path={table}"
    changed = "the data set table is not the one that .* its labels, class names or files differ"
    for words in (
        ["evaluate"],
        ["report"],
        ["report", other_data],
        ["embed", f"--out={tmp_path / 'e'}"],
        ["export", f"--out={tmp_path / 'b'}"],
    ):
        with pytest.raises(ValueError, match=changed) as error:
            main.main([*words, run])
        assert "\n" not in str(error.value)
    assert before == {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    assert not (tmp_path / "e").exists()
    assert main.main(["evaluate", run, other_data]) == 0
    assert folder.load(run)


def _copy(run, folder):
    return shutil.copytree(run, folder / "run")


@pytest.mark.parametrize("is_readable", [True, False])
def test_a_page_is_made_of_what_is_left(run_of_photos, tmp_path, is_readable):
    run = _copy(run_of_photos[0], tmp_path)
    torn = b'{"step": 1, "loss": 1}\n{"step": 2, "lo'
    (run / "metrics.jsonl").write_bytes(torn if is_readable else b"\x00\xff\n[1]\n{}\n")
    (run / "speed.jsonl").write_bytes(b"\x00\xff\n7\n")
    (run / "result.json").write_bytes(b"{")
    facts = page.read(run_page.write_again(run))
    assert (facts.get("curves") is not None) == is_readable
    assert facts["scores"]["tiles"][0]["name"] == "R@1" and not facts.get("faults")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda run, images: shutil.rmtree(run / "checkpoints"), "no checkpoint"),
        (lambda run, images: (run / "config.json").unlink(), "holds no run"),
        (lambda run, images: (run / "config.json").write_text("[]"), "config.json is damaged"),
        (lambda run, images: shutil.rmtree(images), "photos does not exist"),
        (lambda run, images: (run / page.FILE).unlink() or (run / page.FILE).mkdir(), page.FILE),
    ],
)
def test_a_run_that_cannot_be_opened_is_one_line(run_of_photos, tmp_path, change, message):
    run = _copy(run_of_photos[0], tmp_path)
    images = run_of_photos[1]
    kept = shutil.copytree(images, tmp_path / "kept")
    before = (run / page.FILE).read_bytes()
    try:
        change(run, images)
        with pytest.raises((ValueError, OSError), match=message) as caught:
            main.main(["report", str(run)])
    finally:
        shutil.rmtree(images, ignore_errors=True)
        shutil.move(kept, images)
    assert "\n" not in str(caught.value)
    assert (run / page.FILE).is_dir() or (run / page.FILE).read_bytes() == before
