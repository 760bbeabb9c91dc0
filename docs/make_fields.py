"""Writes config.md, the table of all config fields, from the dataclasses of the options.

python docs/make_fields.py
"""

import pathlib

from dmljax.train.options import rows

PAGE = pathlib.Path(__file__).with_name("config.md")


def page() -> str:
    """Returns all fields of a config as a page in Markdown."""
    lines = ["# Fields of a config", "", "| field | meaning | default |", "|---|---|---|"]
    for name, default, meaning in rows():
        value = default.removeprefix("default ")
        lines.append(f"| `{name}` | {meaning} | {value if value == default else f'`{value}`'} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
