"""Look at a run, compare runs, or look at embeddings from elsewhere.

    dmljax report runs/glyphs                      write report.html into the folder of the run
    dmljax report runs/a runs/b                    write runs/a/comparison.html
    dmljax report runs/a runs/b --text             print whether b is better than a
    dmljax report --embeddings=x.npy --labels=y.npy --images=photos/ --out=report.html

A page is one file that opens in any browser, without a network; --text prints the same findings to
the terminal. The test split of a run is embedded again, with the checkpoint that the run chose or
that of --step; --config.dataset.root=... says where its images are now. A comparison reads what the
runs have written: scores.safetensors and report.html. Labels are integers or names in a .npy file,
lines of a .txt file, or items.safetensors of dmljax embed; the images of a folder belong to the
embeddings in the order of their paths.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from absl import logging

from dmljax.commands import evaluate
from dmljax.commands.parser import add_trust
from dmljax.hints import hint

__all__ = ["add_arguments", "print_comparison", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="*", help="folders of runs, such as runs/glyphs")
    parser.add_argument("--workdir", nargs="+", default=[], help="the same, as a flag")
    parser.add_argument("--step", type=int, help="the checkpoint; by default the selected one")
    add_trust(parser)
    parser.add_argument("--text", action="store_true", help="print to the terminal")
    parser.add_argument("--embeddings", help="a .npy file [items, dimensions], instead of a run")
    parser.add_argument("--labels", help="the labels of --embeddings")
    parser.add_argument("--images", help="a folder with the images of --embeddings")
    parser.add_argument("--out", help="the page of --embeddings; report.html by default")


def run(arguments: argparse.Namespace, extras: Sequence[str]) -> int:
    overrides = evaluate.overrides_of("report", extras)
    folders = [*arguments.runs, *arguments.workdir]
    if arguments.embeddings or arguments.labels:
        _check_arrays(arguments, folders, overrides)
        _of_arrays(arguments)
        return 0
    if arguments.images or arguments.out:
        raise ValueError("--images and --out belong to --embeddings: leave them out for a run")
    if not folders:
        raise ValueError("report needs the folder of a run, such as: dmljax report runs/glyphs")
    if len(folders) > 1:
        if arguments.step is not None or overrides:
            raise ValueError(
                "a comparison reads the scores that the runs have written: leave out --step and "
                "--config. fields"
            )
        if arguments.text:
            print_comparison(folders)
        else:
            _write_comparison(folders)
        return 0
    _of_run(folders[0], arguments, overrides)
    return 0


def _say(path: pathlib.Path) -> None:
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


def _check_arrays(
    arguments: argparse.Namespace, folders: Sequence[str], overrides: Sequence[str]
) -> None:
    if not (arguments.embeddings and arguments.labels):
        raise ValueError("--embeddings and --labels go together: give both files")
    if folders or overrides or arguments.step is not None:
        raise ValueError("--embeddings are not those of a run: leave out the run and its flags")
    if arguments.text and arguments.out:
        raise ValueError("--out belongs to the page: leave it out for --text")


def _print(content: Any) -> None:
    """Prints with the colors of a terminal, or plainly into a pipe or a file."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else 120
    Console(highlight=False, emoji=False, markup=False, width=width).print(content)


def _of_arrays(arguments: argparse.Namespace) -> None:
    from dmljax.data import decode
    from dmljax.report import arrays, facts, page, text

    vectors, split = arrays.read(arguments.embeddings, arguments.labels)
    paths = None if not arguments.images else arrays.image_paths(arguments.images, len(vectors))
    content = facts.make(
        vectors,
        split,
        title=pathlib.Path(arguments.embeddings).stem,
        files=None if paths is None else ["/".join(path.parts[-2:]) for path in paths],
        read_fn=None if paths is None else lambda item: decode.read(paths[item]),
        pictures=not arguments.text,
    )
    for fault in content.faults:
        logging.warning("a section is missing (%s): %s", fault.section, fault.message)
    if arguments.text:
        _print(text.of_facts(content))
    else:
        _say(page.write(content, arguments.out or "report.html"))


def _of_run(folder: str, arguments: argparse.Namespace, overrides: Sequence[str]) -> None:
    from dmljax.report import text
    from dmljax.runs import page as run_page

    options = {"step": arguments.step, "overrides": overrides}
    if arguments.text:
        _print(text.of_facts(run_page.facts_again(folder, pictures=False, **options)))
    else:
        _say(run_page.write_again(folder, **options))


def _write_comparison(folders: Sequence[str]) -> None:
    from dmljax.files import reading
    from dmljax.report import compare_page

    names = _names(folders)
    configs = [reading.config_of_run(folder) for folder in folders]
    differing: dict[str, None] = {}
    for other in configs[1:]:
        differing |= {field: None for field, *_ in _config_differences(configs[0], other)}
    rows = [[field, *(_field(one, field) for one in configs)] for field in differing]
    _say(compare_page.write(dict(zip(names, folders, strict=True)), fields=rows))


def _field(config: Any, path: str) -> str:
    """A field of a config by its path, as JSON; empty where there is none."""
    for name in path.split("."):
        config = config.get(name) if isinstance(config, dict) else None
    return "" if config is None else json.dumps(config)


def print_comparison(folders: Sequence[str], *, score: str | None = None) -> None:
    """Prints the comparison of runs with the first of them: of one score, or of all."""
    from dmljax.files import reading
    from dmljax.report import comparison, scores_file, text

    names = _names(folders)
    configs = [reading.config_of_run(folder) for folder in folders]
    runs = {name: scores_file.read(folder) for name, folder in zip(names, folders, strict=True)}
    result = comparison.compare_runs(runs)
    if score is not None:
        if score not in result.scores:
            raise ValueError(f"--score: there is no {score!r}{hint(score, result.scores)}")
        result = result._replace(scores={score: result.scores[score]})
    first = names[0]
    fields = {
        name: list(_config_differences(configs[0], other))
        for name, other in zip(names[1:], configs[1:], strict=True)
    }
    changes = {name: comparison.class_changes(runs[first], runs[name]) for name in names[1:]}
    _print(text.comparison(result, changes=changes, fields=fields))


def _names(folders: Sequence[str]) -> list[str]:
    """The last parts of the folders, or the folders as they are written where two are the same."""
    if len({pathlib.Path(folder).resolve() for folder in folders}) < len(folders):
        raise ValueError(f"a run is named twice: {', '.join(folders)}")
    names = [pathlib.Path(folder).resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else list(folders)


def _config_differences(old: dict[str, Any], new: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """The fields in which two configs differ and that can change a result."""
    from dmljax.config import digests
    from dmljax.config import files as config_files

    yield from config_files.differences(digests.essential(old), digests.essential(new))
