"""The python blocks of README.md and docs/ run, and what README.md lists exists."""

import pathlib
import re

import pytest

import dmljax

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.name}-{i}")
    for page in PAGES
    for i, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.S))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_python_blocks_run(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "block", "exec"), {})


@pytest.mark.parametrize("module", ["losses", "miners", "metrics", "retrieval"])
def test_every_public_function_is_listed(module):
    listed = set(re.findall(r"`([a-z_0-9]+)`", (ROOT / "README.md").read_text()))
    functions = {n for n in getattr(dmljax, module).__all__ if n.islower()}
    assert functions <= listed


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_to_files_exist(page):
    """`docs/make_gallery.py` writes gallery.md, and `docs/api_pages.py` the folder api."""
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists() or target in ("gallery.md", "api/index.md"), target
