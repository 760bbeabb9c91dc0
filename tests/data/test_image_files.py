"""Splits written as folders of images, and read again."""

import io

import numpy as np
import pytest
from PIL import Image

from dmljax.data import datasets, decode, image_files
from dmljax.data.records import Reader
from dmljax.data.splits import Split

NAMES = ("a/b", "a_b", "A_B", "..", "ö" * 200, "ö" * 199 + "x")


def _pixels(count=12, channels=3):
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (count, 9, 7, channels), dtype=np.uint8)


def _encoded(pixels, kind):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def _files(folder):
    """Paths below a folder in the order of their numbers."""
    return sorted(folder.glob("*/*"), key=lambda path: int(path.stem))


@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_come_back_with_their_classes(tmp_path, channels):
    labels = np.arange(12) % 6
    split = Split(_pixels(channels=channels), labels, NAMES)
    assert image_files.write(split, tmp_path / "out", about={}) == 12
    paths = _files(tmp_path / "out")
    for i, path in enumerate(paths):
        expected = np.broadcast_to(split.records[i], (9, 7, 3))
        np.testing.assert_array_equal(decode.read(path), expected)
    folders = [path.parent.name for path in paths]
    assert len({name.casefold() for name in folders}) == 6
    assert all(folders[i] == folders[i % 6] for i in range(12))
    read = datasets.folder(root=tmp_path / "out", split=0.5)
    assert len(read.train.records) + len(read.test.records) == 12


def test_encoded_images_are_copied_and_boxes_are_cut(tmp_path):
    pixels = _pixels(4)
    source = tmp_path / "source.bmp"
    source.write_bytes(_encoded(pixels[2], "BMP"))
    records = (_encoded(pixels[0], "JPEG"), _encoded(pixels[1], "PNG"), str(source))
    split = Split(records, np.zeros(3), ("a",))
    image_files.write(split, tmp_path / "out", about={})
    paths = _files(tmp_path / "out")
    assert [path.name for path in paths] == ["0.jpg", "1.png", "2.bmp"]
    assert [path.read_bytes() for path in paths] == [*records[:2], source.read_bytes()]
    boxes = np.array([[1, 2, 5, 8], [0, 0, 7, 9], [3, 3, 4, 4]])
    cut = Split(records, np.zeros(3), ("a",), boxes=boxes)
    image_files.write(cut, tmp_path / "cut", about={})
    for i, path in enumerate(_files(tmp_path / "cut")):
        np.testing.assert_array_equal(decode.read(path), Reader(cut)(i))


def test_an_interrupted_call_is_repeated_and_other_folders_stay(tmp_path):
    split = Split(_pixels(), np.arange(12) % 3, ("a", "b", "c"))
    out = tmp_path / "out"
    image_files.write(split, out, about={"split": "test"})
    before = {path: path.read_bytes() for path in _files(out)}
    for path in list(before)[::3]:
        path.unlink()
    assert image_files.write(split, out, about={"split": "test"}) == 4
    assert {path: path.read_bytes() for path in _files(out)} == before
    other = Split(_pixels(), np.arange(12) % 2, ("a", "b"))
    for wrong, about in ((split, {"split": "train"}), (other, {"split": "test"})):
        with pytest.raises(ValueError, match="holds other files or images: choose another folder"):
            image_files.write(wrong, out, about=about)
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "mine.png").write_bytes(b"x")
    with pytest.raises(ValueError, match="holds other files"):
        image_files.write(split, photos, about={})
    assert [path.name for path in photos.iterdir()] == ["mine.png"]
