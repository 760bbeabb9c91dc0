"""Writes files.md: what each file of the package holds, from the docstrings.

python docs/make_files.py
"""

import ast
import pathlib

PAGE = pathlib.Path(__file__).with_name("files.md")
PACKAGE = PAGE.parents[1] / "dmljax"
HEAD = """# Every file

What each file of `dmljax/` holds, by its docstring. `python docs/make_files.py` writes this page.
"""


def purpose(path: pathlib.Path) -> str:
    """The first paragraph of the docstring of a module."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(docstring.split("\n\n")[0].split())


def page() -> str:
    """The whole page in Markdown."""
    lines = [HEAD]
    for folder in sorted({path.parent for path in PACKAGE.rglob("*.py")}):
        name = folder.relative_to(PACKAGE.parent).as_posix()
        files = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
        lines += [f"## `{name}/`", "", purpose(folder / "__init__.py"), ""]
        lines += ["| file | what it holds |", "|---|---|"]
        lines += [f"| `{path.name}` | {purpose(path)} |" for path in files]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
