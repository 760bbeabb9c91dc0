"""Docstrings begin with a verb, and sentences are in plain English (see CONTRIBUTING.md)."""

import ast
import pathlib
import re

import pytest

PACKAGE = pathlib.Path(__file__).parents[1] / "dmljax"
FILES = sorted(PACKAGE.rglob("*.py"))
# Third person: "Returns", "Computes", "Raises".
VERB = re.compile(r"[A-Z][a-z-]+s$")
NOT_VERBS = {"This", "Losses", "Scores", "Ranks", "Names", "Images", "Always"}
PHRASES = re.compile(
    r"(?<!here )\b(is|are) no (?!longer\b|better\b|more\b)[a-z]"
    r"|\bof which\b|\bwith which\b|\bas many as\b"
)


def _functions(path):
    """Yields the functions of a file that are not properties, with their docstrings."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = map(ast.unparse, node.decorator_list)
            text = ast.get_docstring(node)
            if text and not any("property" in name for name in decorators):
                yield node, text


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_docstrings_of_functions_begin_with_a_verb(path):
    for node, text in _functions(path):
        word = text.split()[0].strip(".,:`")
        is_verb = VERB.match(word) and word not in NOT_VERBS
        assert is_verb, f"{path.name}:{node.lineno}: {node.name}: {text.splitlines()[0]}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_sentences_have_no_translated_phrases(path):
    for number, line in enumerate(path.read_text().splitlines(), 1):
        assert not PHRASES.search(line), f"{path.name}:{number}: {line.strip()}"
