"""glyphs, the data set without a download: counts, determinism and difficulty."""

import hashlib

import numpy as np
from fontTools import ttLib
from processes import python

from dmljax.data import datasets, glyphs


def _recall(images, labels):
    """R@1 of raw pixels."""
    x = images.reshape(len(images), -1).astype(np.float32)
    norms = (x * x).sum(1)
    distances = norms[:, None] + norms[None] - 2 * x @ x.T
    np.fill_diagonal(distances, np.inf)
    return float((labels[distances.argmin(1)] == labels).mean())


def test_glyphs_has_its_published_counts_and_disjoint_classes():
    dataset = datasets.glyphs()
    sizes = (
        len(dataset.train.names),
        len(dataset.train),
        len(dataset.test.names),
        len(dataset.test),
    )
    assert sizes == tuple(datasets.PUBLISHED["glyphs"])
    assert len(glyphs.CHARACTERS) == len(set(glyphs.CHARACTERS)) == 327 and len(glyphs.FACES) == 16
    assert not set(dataset.train.names) & set(dataset.test.names)
    for split in dataset:
        assert (np.bincount(split.labels) == 16).all()
        assert split.records.shape[1:] == (32, 32, 1) and split.records.dtype == np.uint8


def test_every_face_has_every_character():
    for face in glyphs.FACES:
        path = glyphs.font(face, 22).path
        assert set(map(ord, glyphs.CHARACTERS)) <= set(ttLib.TTFont(path).getBestCmap())


def test_images_do_not_depend_on_the_process_and_the_order():
    code = (
        "import hashlib; from dmljax.data import datasets; s = datasets.glyphs()\n"
        "print(hashlib.sha256(s.train.records.tobytes() + s.test.records.tobytes()).hexdigest())"
    )
    dataset = datasets.glyphs()
    digest = hashlib.sha256(
        dataset.train.records.tobytes() + dataset.test.records.tobytes()
    ).hexdigest()
    assert python(code).stdout.strip() == digest
    two_characters = glyphs.images("ba")
    all_characters = glyphs.images(glyphs.CHARACTERS)
    for i, character in enumerate("ba"):
        row = glyphs.CHARACTERS.index(character) * 16
        assert (two_characters[i * 16 : i * 16 + 16] == all_characters[row : row + 16]).all()


def test_raw_pixels_retrieve_one_in_eight():
    test = datasets.glyphs().test
    assert 0.10 < _recall(test.records, test.labels) < 0.16


def test_instances_differ_and_about_half_are_inverted():
    images = datasets.glyphs().train.records
    assert len({image.tobytes() for image in images}) == len(images)
    border = np.concatenate([images[:, 0], images[:, -1]], axis=1).mean(axis=(1, 2))
    assert 0.45 < (border > 128).mean() < 0.55
