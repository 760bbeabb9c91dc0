"""Files of strangers: JSON of any depth is one line."""

import ast
import json
import pathlib

import pytest

from dmljax.files import reading

PACKAGE = pathlib.Path(reading.__file__).parents[1]


def nested(levels):
    return "[" * levels + "]" * levels


@pytest.mark.parametrize("levels", [101, 600, 100_000])
def test_deep_json_is_an_error_of_one_line(levels, tmp_path):
    """600 levels can be parsed, and exhaust the stack of `marked`, which walks through them."""
    objects = '{"a":' * levels + "1" + "}" * levels
    for text in (nested(levels), objects, '{"b": [], "a": [2, ' + nested(levels - 1) + "]}"):
        with pytest.raises(ValueError, match="nested deeper than 100 levels"):
            reading.json_value(text)
    (tmp_path / "config.json").write_text(objects)
    with pytest.raises(ValueError, match=r"config.json is damaged: it is nested deeper"):
        reading.config_of_run(tmp_path)


def test_other_json_is_as_it_was(tmp_path):
    for value in (json.loads(nested(100)), {"a": [1, {"b": None}], "c": "[[["}, 3, "x", [], None):
        assert reading.json_value(json.dumps(value)) == value
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(ValueError, match=r"a.json is damaged: Expecting"):
        reading.json_file(tmp_path / "a.json")
    with pytest.raises(FileNotFoundError):
        reading.json_file(tmp_path / "b.json")


def test_json_is_parsed_by_one_function():
    """Others may parse text that this process has written, or catch the errors of depth."""
    allowed = {
        "files/reading.py": 1,
        "files/run_folder.py": 1,  # catches RecursionError
        "studies/study_file.py": 1,
        "studies/folder.py": 1,
        "serve/api.py": 2,  # catches RecursionError
        "train/hosts.py": 1,  # of another process of the run
    }
    calls = {}
    names = ("json.loads", "json.load", "msgspec.json.decode")
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in names:
                name = str(path.relative_to(PACKAGE))
                calls[name] = calls.get(name, 0) + 1
    assert calls == allowed
