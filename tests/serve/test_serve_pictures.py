"""Small pictures of stored items: what is kept in memory."""

import numpy as np
from PIL import Image

from dmljax.serve import pictures


def test_pictures_in_memory_have_a_limit_in_bytes(tmp_path, monkeypatch):
    """Pictures that are no longer in their files come from the memory; the last used ones stay."""
    rng = np.random.default_rng(0)
    for name in "abcd":
        noise = rng.integers(0, 256, (50, 50, 3), np.uint8)
        Image.fromarray(noise).save(tmp_path / f"{name}.png")
    shown = pictures.Pictures(tmp_path)
    names = [f"{name}.png" for name in "abcd"]
    a, b, c, d = names
    size = max(len(pictures.Pictures(tmp_path).read(name)) for name in names)
    monkeypatch.setattr(pictures, "_CACHED_BYTES", 2 * size)
    first = shown.read(a)
    for name in (b, a, c, a, d, a):
        assert shown.read(name)[:2] == b"\xff\xd8"
    for name in names:
        (tmp_path / name).unlink()
    assert shown.read(a) == first and shown.read(d) is not None
    assert shown.read(b) is None and shown.read(c) is None
    assert "e.png" not in shown and shown.read("e.png") is None
