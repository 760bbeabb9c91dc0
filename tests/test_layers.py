"""The library does not import the application, imports have no cycle, `data` never imports jax."""

import ast
import pathlib

import pytest
from processes import python

PACKAGE = pathlib.Path(__file__).parents[1] / "dmljax"
# What a notebook imports. Every other name in the package belongs to the application.
LIBRARY = {"ops", "losses", "miners", "metrics", "retrieval", "nets", "weights"}
LIBRARY |= {"adapt", "methods", "data", "files", "hints", "index", "vectors"}
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


def _unit(path: pathlib.Path) -> str:
    """The module or package directly under `dmljax` that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imports(path: pathlib.Path) -> set[str]:
    """The modules and packages directly under `dmljax` that a file imports, at any depth."""
    units = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            units |= {a.name.split(".")[1] for a in node.names if a.name.startswith("dmljax.")}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write absolute imports"
            parts = (node.module or "").split(".")
            if parts[0] == "dmljax":
                units |= {parts[1]} if len(parts) > 1 else {a.name for a in node.names}
    return units


LIBRARY_FILES = [path for path in FILES if _unit(path) in LIBRARY]
UNITS = sorted({_unit(path) for path in FILES})
IMPORTS = {
    unit: set().union(*(_imports(path) for path in FILES if _unit(path) == unit)) - {unit}
    for unit in UNITS
}


def test_every_library_name_exists():
    assert set(UNITS) >= LIBRARY


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_library_does_not_import_the_application(path):
    if _unit(path) in LIBRARY:
        wrong = _imports(path) - LIBRARY
        assert not wrong, f"{path.relative_to(PACKAGE)} may not import {sorted(wrong)}"


@pytest.mark.parametrize("path", LIBRARY_FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_library_reads_no_environment_variable_and_no_config(path):
    tree = ast.parse(path.read_text())
    names = {ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    names |= {a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names}
    names |= {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}
    assert not names & {"os.environ", "os.getenv", "os.putenv", "environ", "getenv", "config"}


def test_imports_form_no_cycle():
    """Repeatedly remove what imports nothing that remains; a cycle would be left over."""
    remaining = {unit: set(others) for unit, others in IMPORTS.items()}
    while leaves := {unit for unit, others in remaining.items() if not others & set(remaining)}:
        remaining = {unit: others for unit, others in remaining.items() if unit not in leaves}
    assert not remaining, f"these import each other in a circle: {remaining}"


def _modules_of(path: pathlib.Path) -> set[str]:
    """The files of the package that a file imports, at module level and inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from dmljax.data import splits` imports a file, `from ... import divide` a function.
            files = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in MODULES else node.module for name in files}
    return {name for name in names if name in MODULES}


def _module(path: pathlib.Path) -> str:
    name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    return name.removesuffix(".__init__")


MODULES = {_module(path): path for path in FILES}


def test_no_files_import_each_other_in_a_circle():
    remaining = {name: _modules_of(path) - {name} for name, path in MODULES.items()}
    while leaves := {name for name, others in remaining.items() if not others & set(remaining)}:
        remaining = {name: others for name, others in remaining.items() if name not in leaves}
    # What only imports a circle is in none.
    while outside := set(remaining) - set().union(*remaining.values()):
        remaining = {name: others for name, others in remaining.items() if name not in outside}
    assert not remaining, f"these files import each other in a circle: {sorted(remaining)}"


def test_data_does_not_import_jax():
    paths = (path.relative_to(PACKAGE.parent) for path in (PACKAGE / "data").rglob("*.py"))
    names = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in paths]
    code = (
        f"import importlib, sys\nfor name in {names}: importlib.import_module(name)\n"
        "sys.exit('jax was imported' if 'jax' in sys.modules else 0)"
    )
    python(code)


def test_importing_the_package_is_quick_and_lazy():
    code = (
        "import sys, time; start = time.process_time(); import dmljax\n"
        "assert time.process_time() - start < 0.3 and 'jax' not in sys.modules\n"
        "import dmljax.recipes; assert 'PIL' not in sys.modules  # they are data\n"
        "from dmljax import losses; assert 'jax' in sys.modules\n"
        "import dmljax.runs.training; assert 'scipy.stats' not in sys.modules  # half a second"
    )
    python(code)
