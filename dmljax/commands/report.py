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

_OMITTED = ("lone", "unreadable", "P@1")  # in words, or the same as R@1


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
        if arguments.text:
            _print_arrays(arguments.embeddings, arguments.labels)
        else:
            _write_arrays(arguments)
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
    if arguments.text:
        _print_run(folders[0], step=arguments.step, overrides=overrides)
        return 0
    from dmljax.runs import page as run_page

    _say(run_page.write_again(folders[0], step=arguments.step, overrides=overrides))
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
    if arguments.text and (arguments.images or arguments.out):
        raise ValueError("--images and --out belong to the page: leave them out for --text")


def _print(content: Any) -> None:
    """Prints with the colors of a terminal, or plainly into a pipe or a file."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else 120
    Console(highlight=False, emoji=False, markup=False, width=width).print(content)


def _print_arrays(embeddings: str, labels: str) -> None:
    from dmljax.report import arrays, findings, scores_file, text

    vectors, split = arrays.read(embeddings, labels)
    scores = scores_file.score(vectors, split)
    content = findings.findings(vectors, split, scores)
    notes = []
    if len(split.names) == 1:
        notes.append("one class: every item is right, and the scores say nothing")
    _print(
        text.run(
            content,
            title=f"{pathlib.Path(embeddings).name}: {len(vectors):,} items, "
            f"{vectors.shape[1]} dimensions",
            names=split.names,
            name_fn=lambda row: f"item {row}",
            notes=notes,
        )
    )


def _print_run(folder: str, *, step: int | None, overrides: Sequence[str]) -> None:
    from dmljax.data.reader import Reader
    from dmljax.report import findings, text
    from dmljax.report import run as run_files
    from dmljax.runs import folder as run_folder
    from dmljax.runs import page as run_page
    from dmljax.train.evaluation import MAIN, Evaluator

    trained, state = run_folder.reopen(folder, step=step, overrides=overrides)
    if not len(trained.test):
        raise ValueError(f"{folder} has no test images to report on")
    embeddings = Evaluator(trained).embeddings(state, trained.test)[MAIN]
    scores = run_folder.query_scores(trained, embeddings, folder, step=int(state.step))
    if step is None:
        run_folder.write_query_scores(scores, folder)
    reader = Reader(trained.test, cache=False)
    content = findings.findings(
        embeddings,
        trained.test,
        scores,
        read_fn=lambda row: reader(int(row)),
        devices=trained.shards.mesh.local_devices,
    )
    names = run_page.short_names(trained.test)
    evaluated = run_files.read(pathlib.Path(folder)).scores_at(int(state.step)).get("test", {})
    _print(
        text.run(
            content,
            title=pathlib.Path(folder).resolve().name,
            names=trained.test.names,
            name_fn=lambda row: f"image {row}" if names is None else names[row],
            notes=[f"test split {run_folder.describe_score(trained, state)}"],
            other_scores={
                k: v for k, v in evaluated.items() if k not in _OMITTED and not k.endswith("_std")
            },
        )
    )


def _write_arrays(arguments: argparse.Namespace) -> None:
    from dmljax.data import decode
    from dmljax.report import arrays, facts, page

    vectors, split = arrays.read(arguments.embeddings, arguments.labels)
    paths = None if not arguments.images else arrays.image_paths(arguments.images, len(vectors))
    content = facts.make(
        vectors,
        split.labels,
        title=pathlib.Path(arguments.embeddings).stem,
        names=split.names,
        query=split.query,
        gallery=split.gallery,
        files=None if paths is None else ["/".join(path.parts[-2:]) for path in paths],
        read_fn=None if paths is None else lambda item: decode.read(paths[item]),
    )
    for fault in content.faults:
        logging.warning("a section is missing (%s): %s", fault.section, fault.message)
    _say(page.write(content, arguments.out or "report.html"))


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
