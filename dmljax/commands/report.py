"""Report on a run, compare runs, or report on embeddings of another program.

    dmljax report runs/glyphs                      write report.html into the folder of the run
    dmljax report runs/a runs/b                    write runs/a/comparison.html
    dmljax report runs/a runs/b --text             print whether b is better than a
    dmljax report --embeddings=x.npy --labels=y.npy --images=photos/ --out=report.html
    dmljax report --embeddings=new.npy --labels=y.npy --baseline=old.npy
                                                   is new.npy better than old.npy?

The page is one file that opens in any browser without a network; --text prints the main numbers.
The command embeds the test split again, with the selected checkpoint or the checkpoint --step;
--config.dataset.root=... names a new folder of the images. It refuses data whose labels, paths or
sampled file sizes have changed since the training. A comparison reads scores.safetensors and
report.html of the runs.

Labels are integers or names in a .npy file, lines of a .txt file, or items.safetensors of dmljax
embed. The images of a folder belong to the embeddings in the order of their paths. --baseline names
the embeddings of another model, such as before fine-tuning, for the same images in the same order;
the dimension may differ. Both are scored on the same queries, and the first line warns if the new
ones are worse. Embeddings are ranked by Euclidean distance; --distance=cosine gives another ranking
unless all norms are equal.
"""

import argparse
import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from dmljax.commands import evaluate
from dmljax.commands.parser import add_fields, flag, given, leave_out
from dmljax.files import reading
from dmljax.hints import check_known

_DISTANCES = ("euclidean", "cosine")  # functions of dmljax.retrieval


@dataclasses.dataclass(frozen=True)
class Flags:
    """Flags of a report; all but `text` belong to --embeddings."""

    text: bool = flag(False, "print the main numbers instead of writing the page")
    embeddings: str | None = flag(None, ".npy file [items, dimensions] instead of a run")
    labels: str | None = flag(None, "file with the labels of --embeddings")
    baseline: str | None = flag(None, "file of other embeddings of the same images to compare")
    distance: str | None = flag(None, "distance of --embeddings: euclidean (default) or cosine")
    images: str | None = flag(None, "folder with the images of --embeddings")
    out: str | None = flag(None, "page of --embeddings to write; report.html by default")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="*", help="folders of runs, such as runs/glyphs")
    evaluate.add_step(parser)
    add_fields(parser, Flags)


def run(arguments: argparse.Namespace, extras: Sequence[str]) -> int:
    overrides = evaluate.overrides_of("report", extras)
    folders = [str(reading.chosen_run(run)) for run in arguments.runs]
    reopens = bool(overrides) or arguments.step is not None
    of_run = [*["the run"] * bool(folders), *["--step and --config. fields"] * reopens]
    if arguments.embeddings or arguments.labels:
        leave_out(of_run, "--embeddings are a file")
        _of_arrays(arguments)
        return 0
    of_arrays = given(arguments, "images", "out", "baseline", "distance")
    leave_out(of_arrays, "a report on a run takes no flags of --embeddings")
    if not folders:
        raise ValueError("report needs the folder of a run, such as: dmljax report runs/glyphs")
    from dmljax.report import compare_page, comparison, text
    from dmljax.runs import page as run_page

    if len(folders) > 1:
        leave_out(of_run[1:], "a comparison reads the scores that the runs have written")
        runs = _by_name(folders)
        if arguments.text:
            text.show(text.comparison(comparison.read(runs)))
        else:
            _say(compare_page.write(runs))
        return 0
    options = {"step": arguments.step, "overrides": overrides}
    if arguments.text:
        text.show(text.of_facts(run_page.facts_again(folders[0], pictures=False, **options)))
    else:
        _say(run_page.write_again(folders[0], **options))
    return 0


def _say(path: pathlib.Path) -> None:
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")


def _of_arrays(arguments: argparse.Namespace) -> None:
    if not (arguments.embeddings and arguments.labels):
        raise ValueError("--embeddings and --labels go together: give both files")
    if arguments.text:
        leave_out(given(arguments, "out"), "--text writes no page")
    distance = arguments.distance or "euclidean"
    check_known("--distance: there is no", [distance], _DISTANCES)
    from dmljax import retrieval
    from dmljax.data import decode
    from dmljax.report import arrays, compare_page, facts, page, text

    vectors, split = arrays.read(arguments.embeddings, arguments.labels)
    models = {pathlib.Path(arguments.embeddings).stem: vectors}
    if arguments.baseline:
        names = _by_name([arguments.baseline, arguments.embeddings], what="file")
        others = arrays.read_baseline(arguments.baseline, vectors, name=arguments.embeddings)
        models = dict(zip(names, (others, vectors), strict=True))
    *_, name = models
    paths = None if not arguments.images else arrays.image_paths(arguments.images, len(vectors))
    similarity_fn = getattr(retrieval, distance)
    options: dict[str, Any] = {
        "similarity_fn": similarity_fn,
        "files": None if paths is None else ["/".join(path.parts[-2:]) for path in paths],
        "read_fn": None if paths is None else lambda item: decode.read(paths[item]),
    }
    if arguments.baseline:
        result = compare_page.compare(models, split, similarity_fn=similarity_fn)
        if worse := result.worse_note(name):
            print(f"{name}: {worse}")
        if arguments.text:
            text.show(text.comparison(result))
            return
        content = compare_page.facts_of_models(models, split, result, **options)
    else:
        content = facts.make(vectors, split, title=name, pictures=not arguments.text, **options)
    if arguments.text:
        text.show(text.of_facts(content))
    else:
        _say(page.write(content, arguments.out or page.FILE))


def _by_name(folders: Sequence[str], *, what: str = "run") -> dict[str, str]:
    """Returns the paths by their last parts, or by the given text if two last parts are equal."""
    if len({pathlib.Path(folder).resolve() for folder in folders}) < len(folders):
        raise ValueError(f"a {what} is named twice: {', '.join(folders)}")
    names = [pathlib.Path(folder).resolve().name for folder in folders]
    return dict(zip(names if len(set(names)) == len(names) else folders, folders, strict=True))
