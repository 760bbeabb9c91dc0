"""Writes the table of fields in config.md from the dataclasses of the options.

python docs/make_fields.py
"""

import pathlib

from dmljax.train.options import rows

PAGE = pathlib.Path(__file__).with_name("config.md")
START, END = "<!-- Written by make_fields.py. -->\n\n", "\n<!-- End. -->\n"


def table() -> str:
    """All fields of a config as a table in Markdown."""
    lines = ["| field | what | default |", "|---|---|---|"]
    for name, default, meaning in rows():
        value = default.removeprefix("default ")
        lines.append(f"| `{name}` | {meaning} | {value if value == default else f'`{value}`'} |")
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """The page `text` with the present table."""
    head, _, old_table_and_tail = text.partition(START)
    return head + START + table() + END + old_table_and_tail.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
