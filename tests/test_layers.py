"""Imports point down only; `data` and `config` never import jax; `import dmljax` is quick."""

import ast
import pathlib
import subprocess
import sys

import pytest

PACKAGE = pathlib.Path(__file__).parents[1] / "dmljax"
# A room may import rooms of a lower level only. Equal levels may not know each other.
LEVELS = {
    "main": 11,
    "train": 10,
    "trained": 9,
    "runs": 8,
    "train_step": 7,
    "evaluate": 7,
    "checkpoint": 8,
    "optim": 7,
    "sharding": 2,
    "hosts": 2,
    "log": 7,
    "report": 7,
    "methods": 6,
    "losses": 4,
    "miners": 3,
    "nets": 4,
    "metrics": 5,
    "retrieval": 4,
    "ops": 2,
    "config": 0,
    "data": 1,
}


def _imports(path: pathlib.Path) -> set[str]:
    """Names of the dmljax rooms that a file imports, wherever in the file."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            rooms |= {a.name.split(".")[1] for a in node.names if a.name.startswith("dmljax.")}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write absolute imports"
            parts = (node.module or "").split(".")
            if parts[0] == "dmljax":
                rooms |= {parts[1]} if len(parts) > 1 else {a.name for a in node.names}
    return rooms


def _files():
    return [p for p in sorted(PACKAGE.rglob("*.py")) if p != PACKAGE / "__init__.py"]


@pytest.mark.parametrize("path", _files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_down(path):
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    assert room in LEVELS, f"{room} is not in the house: give it a level"
    wrong = {other for other in _imports(path) - {room} if LEVELS[other] >= LEVELS[room]}
    assert not wrong, f"{room} may not import {sorted(wrong)}"


@pytest.mark.parametrize("room", ["config", "data"])
def test_jax_free_rooms(room):
    names = [f"dmljax.{room}"]
    names += [f"dmljax.{room}.{p.stem}" for p in sorted((PACKAGE / room).glob("[a-z]*.py"))]
    code = (
        f"import importlib, sys\nfor name in {names}: importlib.import_module(name)\n"
        "sys.exit('jax was imported' if 'jax' in sys.modules else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_is_quick_and_lazy():
    code = (
        "import sys, time; start = time.perf_counter(); import dmljax\n"
        "assert time.perf_counter() - start < 0.3 and 'jax' not in sys.modules\n"
        "from dmljax import losses; assert 'jax' in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
