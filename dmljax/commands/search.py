"""Find the stored images that are most similar to an image.

    dmljax search photos.bundle --index=photos.index query.jpg
    dmljax search photos.bundle --index=photos.index query.jpg --k=5 --threshold=fmr=1e-3
    dmljax search photos.bundle --index=photos.index *.jpg --where=folder=cats --where="year>=1990"
    dmljax search --index=photos.index --id=cats/1.jpg
    dmljax search clip.bundle --index=photos.index --text="red shoe"

Each hit is one line: rank, similarity, id, metadata. --threshold is a similarity, or the name of a
threshold of the bundle: less similar images are left out, and "no match" is an answer. --where
compares a field of the metadata (= < <= > >=). Repeat it for further conditions; the same field
with = gives alternatives. Values are numbers, true, false, null or text. A number also equals the
same text: --where=folder=2020 finds the folder 2020; '"2020"' in quotes is only text. --text needs
the bundle of a net that was trained with text (docs/ship.md).
"""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from dmljax.commands.parser import add_fields, flag, load_bundle, refuse
from dmljax.index import filters, inputs
from dmljax.index import open as open_index
from dmljax.index.base import Hit


@dataclasses.dataclass(frozen=True)
class Flags:
    """Flags of a search."""

    index: str | None = flag(None, "index to search: a folder or postgresql://...")
    id: tuple[str, ...] = flag((), "search by a stored item; may be repeated")
    text: tuple[str, ...] = flag((), "search by words; may be repeated")
    k: int | None = flag(None, f"number of hits (default {inputs.DEFAULT_K})", type=int)
    threshold: str | None = flag(None, "lowest similarity, or a name such as fmr=1e-3")
    where: tuple[str, ...] = flag((), "filter: FIELD=VALUE, FIELD>=VALUE; may be repeated")
    json: bool = flag(False, "print a line of JSON per query")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="BUNDLE IMAGE", help="bundle, then images")
    add_fields(parser, Flags)


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
    bundle = load_bundle(words[0]) if words else None
    thresholds = {} if bundle is None else bundle.thresholds
    threshold = inputs.threshold(arguments.threshold, thresholds)
    k = inputs.DEFAULT_K if arguments.k is None else arguments.k
    options: dict[str, Any] = {"where": filters.from_words(arguments.where)}
    options |= {"threshold": threshold, "allow_fewer": arguments.k is None}
    with open_index(arguments.index, model=None if bundle is None else bundle.digest) as store:
        results = [*zip(ids, store.search_ids(ids, k, **options), strict=True)]
        if bundle is not None and (images := words[1:]):
            # An index of vectors that `dmljax embed --prefix` wrote is searched by such prefixes.
            prefix = None if store.dimension == bundle.dimension else store.dimension
            vectors = bundle.embed(images, prefix=prefix)
            results += zip(images, store.search(vectors, k, **options), strict=True)
        if bundle is not None and texts:
            vectors = bundle.embed_text(texts)
            results += zip(texts, store.search(vectors, k, **options), strict=True)
    for query, hits in results:
        if arguments.json:
            content = {"query": query, "hits": [hit._asdict() for hit in hits]}
            print(json.dumps(content, ensure_ascii=False))
        else:
            print(_table(query, hits, arguments.threshold, threshold))
    return 0


def _table(query: str, hits: list[Hit], name: str | None, threshold: float | None) -> str:
    lines = [query]
    width = max((len(hit.id) for hit in hits), default=0)
    for rank, hit in enumerate(hits, start=1):
        metadata = json.dumps(hit.metadata, ensure_ascii=False) if hit.metadata else ""
        lines.append(f"{rank:4d}  {hit.similarity:7.4f}  {hit.id:{width}s}  {metadata}".rstrip())
    if not hits:
        limit = "" if threshold is None else f" with a similarity of {threshold:.4f} ({name})"
        lines.append(f"      no match{limit}")
    return "\n".join(lines)
