"""glyphs, the data set without a download: counts, determinism and difficulty."""

import hashlib
import time
import unicodedata

import numpy as np
from fontTools import ttLib
from PIL import Image, ImageFont
from processes import python

from dmljax.data import datasets, glyphs, transforms


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
        path = glyphs._font(face).path
        assert set(map(ord, glyphs.CHARACTERS)) <= set(ttLib.TTFont(path).getBestCmap())


def _shape(font, character):
    """The character without size and position: cut to its bounding box and scaled."""
    mask = font.getmask(character, mode="L")
    ink = Image.frombytes("L", mask.size, bytes(mask))
    ink = ink.crop(ink.getbbox())
    scale = 24 / max(ink.size)
    ink = ink.resize([max(1, round(side * scale)) for side in ink.size], Image.Resampling.BILINEAR)
    canvas = Image.new("L", (24, 24))
    canvas.paste(ink, ((24 - ink.size[0]) // 2, (24 - ink.size[1]) // 2))
    vector = np.asarray(canvas, np.float32).ravel()
    return vector / np.linalg.norm(vector)


def test_no_two_classes_look_alike():
    similarity = 0
    for face in glyphs.FACES:
        font = ImageFont.truetype(glyphs._font(face).path, 48)
        shapes = np.stack([_shape(font, c) for c in glyphs.CHARACTERS])
        similarity += shapes @ shapes.T / len(glyphs.FACES)
    np.fill_diagonal(similarity, 0)
    # For comparison: Latin, Greek and Cyrillic A reach 0.99, S and s 0.93, O and o 0.89.
    assert similarity.max() < 0.9
    folded = [unicodedata.normalize("NFKC", c).casefold() for c in glyphs.CHARACTERS]
    twins = [(i, j) for i, a in enumerate(folded) for j in range(i) if folded[j] == a]
    assert all(similarity[i, j] < 0.8 for i, j in twins)


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


def test_rendering_is_quick():
    glyphs.images.cache_clear()
    start = time.process_time()
    glyphs.images(glyphs.CHARACTERS)
    assert time.process_time() - start < 10  # one to three seconds; ten on a busy machine


def test_raw_pixels_retrieve_one_in_eight():
    test = datasets.glyphs().test
    assert 0.10 < _recall(test.records, test.labels) < 0.16


def test_instances_differ_and_about_half_are_inverted():
    images = datasets.glyphs().train.records
    assert len({image.tobytes() for image in images}) == len(images)
    border = np.concatenate([images[:, 0], images[:, -1]], axis=1).mean(axis=(1, 2))
    assert 0.45 < (border > 128).mean() < 0.55


def test_training_draws_a_new_distortion_each_time():
    image = datasets.glyphs().train.records[40]
    rng = np.random.default_rng(0)
    (distortion,) = transforms.glyphs_train()
    views = np.stack([distortion(image, rng) for _ in range(20)])
    assert views.shape == (20, 32, 32, 1) and len({v.tobytes() for v in views}) == 20
    nothing = transforms.distort(rotation=0, shear=0, scale=(1, 1), shift=0, invert=0, noise=0)
    assert (nothing(image, rng) == image).all()
