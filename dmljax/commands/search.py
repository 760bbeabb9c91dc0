"""Find the stored images that are most similar to an image.

    dmljax search photos.bundle --index=photos.index query.jpg
    dmljax search photos.bundle --index=photos.index query.jpg --k=5 --threshold=fmr=1e-3
    dmljax search photos.bundle --index=photos.index *.jpg --where=folder=cats --where="year>=1990"
    dmljax search --index=photos.index --id=cats/1.jpg
    dmljax search clip.bundle --index=photos.index --text="red shoe"

Each hit is a line: rank, similarity, id, metadata. The similarity is the cosine or, where the
bundle compares by Euclidean distance, minus the distance. --threshold is a similarity, or the name
of a threshold of the bundle: less similar images are left out, and "no match" is an answer. --where
compares a field of the metadata (= < <= > >=); repeat it for further conditions, or with the same
field and = for alternatives. Values are numbers, true, false, null or text. What can be read as a
number equals such text as well: --where=folder=2020 finds the folder 2020; '"2020"' in quotes is
text only. In a range, 2020 is text where the field holds text and no numbers. --text needs the
bundle of a net that was trained with text (docs/ship.md).
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dmljax.commands.parser import refuse
from dmljax.files import reading
from dmljax.hints import NO_THRESHOLDS, hint
from dmljax.index import Hit, Index, inputs
from dmljax.index import open as open_index


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="BUNDLE IMAGE", help="bundle, then images")
    parser.add_argument("--index", help="index to search: a folder or postgresql://...")
    parser.add_argument("--id", action="append", default=[], help="search by a stored item")
    parser.add_argument("--text", action="append", default=[], help="search by words")
    parser.add_argument("--k", type=int, help=f"how many items (default {inputs.DEFAULT_K})")
    parser.add_argument("--threshold", help="least similarity, or its name: fmr=1e-3")
    parser.add_argument("--where", action="append", default=[], help="FIELD=VALUE, FIELD>=VALUE")
    parser.add_argument("--exact", action="store_true", help="compare with every item")
    parser.add_argument("--json", action="store_true", help="print a line of JSON per query")


def run(arguments: argparse.Namespace, extras: Sequence[str]) -> int:
    refuse("search", [word for word in extras if word.startswith("-")])
    if not arguments.index:
        raise ValueError("search needs --index, a folder or an address postgresql://...")
    # argparse leaves words after a flag among the extras.
    words, ids, texts = [*arguments.words, *extras], arguments.id, arguments.text
    if (len(words) < 2 and not ids and not texts) or (texts and not words):
        raise ValueError(
            "search needs a bundle with an image or --text, or --id (dmljax search --help)"
        )
    bundle = None
    if words:
        from dmljax import bundle as bundles
        from dmljax.train import compilation

        compilation.keep_programs_or_warn()
        bundle = bundles.load(words[0])
    thresholds = None if bundle is None else bundle.thresholds
    threshold = threshold_of(arguments.threshold, thresholds)
    k = inputs.DEFAULT_K if arguments.k is None else arguments.k
    where = conditions(arguments.where)
    options: dict[str, Any] = {"exact": arguments.exact, "threshold": threshold}
    options |= {"allow_fewer": arguments.k is None}
    with open_index(arguments.index, model=None if bundle is None else bundle.digest) as store:
        options["where"] = typed(where, store)
        results = _each(ids, store.search_ids(ids, k, **options))
        if images := words[1:]:
            assert bundle is not None
            # An index of vectors that `dmljax embed --prefix` wrote is searched by such prefixes.
            prefix = None if store.dimension == bundle.dimension else store.dimension
            batch = np.stack([_prepare(bundle, path) for path in images])
            vectors = bundle.embed_prepared(batch, prefix=prefix)
            results += _each(images, store.search(vectors, k, **options))
        if texts:
            assert bundle is not None
            results += _each(texts, store.search(bundle.embed_text(texts), k, **options))
    for query, hits, exact in results:
        if arguments.json:
            content = {"query": query, "exact": exact, "hits": [hit._asdict() for hit in hits]}
            print(json.dumps(content, ensure_ascii=False))
        else:
            title = query if exact else f"{query} (approximate search)"
            print(_table(title, hits, arguments.threshold, threshold))
    return 0


def _each(queries: Sequence[str], answers: Any) -> list[tuple[str, list[Hit], bool]]:
    """Queries with their hits, and whether every item was compared with them."""
    return [(x, hits, answers.exact) for x, hits in zip(queries, answers, strict=True)]


def _prepare(bundle: Any, path: str) -> np.ndarray:
    try:
        return bundle.prepare(path)
    except (ValueError, OSError) as error:
        raise ValueError(str(error) if path in str(error) else f"{path}: {error}") from None


def _table(query: str, hits: list[Hit], name: str | None, threshold: float | None) -> str:
    lines = [query]
    width = max((len(hit.id) for hit in hits), default=0)
    for rank, hit in enumerate(hits, start=1):
        metadata = json.dumps(hit.metadata, ensure_ascii=False) if hit.metadata else ""
        lines.append(f"{rank:4d}  {hit.similarity:7.4f}  {hit.id:{width}s}  {metadata}".rstrip())
    if not hits:
        limit = "" if threshold is None else f" with a similarity of {threshold:.4f} ({name})"
        lines.append(f"      no match{limit}" if name else "      no match")
    return "\n".join(lines)


def threshold_of(text: str | None, thresholds: Mapping[str, float] | None) -> float | None:
    """The similarity of a threshold: a number, or a name of the bundle's `thresholds`.

    They are None where no bundle is given.
    """
    if text is None:
        return None
    if thresholds is not None and text in thresholds:
        return thresholds[text]
    try:
        return float(text)
    except ValueError:
        if thresholds is None:
            reason = ": names need a bundle, dmljax search BUNDLE --index=..."
        else:
            reason = hint(text, thresholds) if thresholds else NO_THRESHOLDS
        raise ValueError(
            f"--threshold={text} is neither a similarity nor a threshold of the bundle{reason}"
        ) from None


class _Bound(NamedTuple):
    """A bound of a range: as JSON, and as it was written."""

    value: Any
    text: str


def typed(where: dict[str, Any] | None, store: Index) -> dict[str, Any] | None:
    """A filter of `conditions`, as `store.search` takes it.

    A number is text where the field has text and no numbers. A bound that is text is refused where
    the field has numbers and no text: nothing could match.
    """
    typed_where = dict(where or {})
    for field, wanted in typed_where.items():
        if isinstance(wanted, dict):
            # Every text, and every number, is in one of these ranges.
            has_text, has_numbers = (
                store.count({field: {">=": least}}) > 0 for least in ("", -sys.float_info.max)
            )
            bounds: dict[str, Any] = {}
            for operator, (value, text) in wanted.items():
                if isinstance(value, str) and has_numbers and not has_text:
                    raise ValueError(
                        f"--where={field}{operator}{text}: {field!r} has numbers and no text, so "
                        "nothing matches: compare it with a number"
                    )
                is_number = not isinstance(value, str)
                bounds[operator] = text if is_number and has_text and not has_numbers else value
            typed_where[field] = bounds
    return typed_where or None


def conditions(words: Sequence[str]) -> dict[str, Any] | None:
    """The filter of the words of `--where`, whose ranges `typed` completes.

    `x=1` is the number or the text: an item has one of them at most.
    """
    where: dict[str, Any] = {}
    for word in words:
        match = re.fullmatch(r"([^<>=]+)(<=|>=|<|>|=)(.*)", word, re.DOTALL)
        if match is None or match[1].endswith("!"):
            raise ValueError(f"--where={word!r} is not FIELD=VALUE, nor with < <= > >=")
        field, operator, text = match.groups()
        value = _json(text)
        earlier = where.get(field)
        if operator == "=" and not isinstance(earlier, dict):
            values = [value] if isinstance(value, str | list | dict) else [value, text]
            where[field] = [*(earlier or []), *values]
        elif operator != "=" and (earlier is None or isinstance(earlier, dict)):
            where[field] = {**(earlier or {}), operator: _Bound(value, text)}
        else:
            raise ValueError(f"--where: {field!r} has both a value and a range: give one of them")
    return where or None


def _json(text: str) -> Any:
    """The JSON value of a word; the text if it is none, or a number that metadata cannot have."""
    try:
        value = reading.json_value(text)
    except ValueError:
        return text
    is_too_large = isinstance(value, int) and not inputs.is_integer_of_64_bits(value)
    return text if is_too_large or value in (math.inf, -math.inf) else value
