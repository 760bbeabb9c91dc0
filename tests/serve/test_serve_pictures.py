"""Small pictures of stored items: what is kept in memory."""

import pytest

from dmljax.serve import pictures


def test_pictures_in_memory_have_a_limit_in_bytes(tmp_path, monkeypatch):
    """The last used ones stay."""
    for name in "abcd":
        (tmp_path / f"{name}.png").write_bytes(b"file of " + name.encode())
    shown = pictures.Pictures(tmp_path)
    monkeypatch.setattr(pictures, "_CACHED_BYTES", 20)
    for name in "abacad":
        if shown.kept(f"{name}.png") is None:
            shown.keep(f"{name}.png", name.encode() * 10)
    assert [name for name in "abcd" if shown.kept(f"{name}.png")] == ["a", "d"]
    shown.keep("d.png", b"d" * 10)  # again: it is counted once
    assert shown.kept("a.png") == b"a" * 10
    assert shown.read("b.png") == b"file of b" and "b.png" in shown and "e.png" not in shown


def test_links_out_of_the_folder_are_not_read(tmp_path):
    (tmp_path / "secret.png").write_bytes(b"secret")
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "a.png").write_bytes(b"picture")
    shown = pictures.Pictures(folder)
    (folder / "a.png").unlink()
    (folder / "a.png").symlink_to(tmp_path / "secret.png")
    with pytest.raises(ValueError, match="leads out"):
        shown.read("a.png")
