"""Make an index of images or vectors, add to it, and look after it.

    dmljax index create photos.index --bundle=photos.bundle --images=collection/
    dmljax index create "postgresql://user@host/db?table=photos" --bundle=... --images=...
    dmljax index create photos.index --bundle=photos.bundle --split=test --images=collection/
    dmljax index create photos.index --bundle=photos.bundle --import=vectors/
    dmljax index add photos.index --bundle=photos.bundle --images=more/
    dmljax index reindex photos.index --bundle=new.bundle --images=collection/
    dmljax index remove photos.index cats/1.jpg cats/2.jpg
    dmljax index remove photos.index --not-in=collection/      items whose files are gone
    dmljax index list photos.index                       items, size, recall; --items lists all ids
    dmljax index tune photos.index --compact             the graph, and the space of removed items
    dmljax index tune photos.index --first=bits          a search in two stages instead of the graph
    dmljax index check photos.index
    dmljax index export photos.index photos.parquet

An index is a folder or an address postgresql://. `create` makes one, and continues one of the same
bundle: repeat an interrupted command. `add` needs an index that exists. `reindex`
fills an index of another bundle beside the present one and then switches at once, if no item is
missing from the new one; with --drop-missing it switches in any case. Repeated after an
interruption with the same images, it continues.

--images is a folder, or a Parquet file with a column `path` (relative ones begin at the folder of
the file) and perhaps `id`; its other columns are metadata. The id of an image is its path below the
folder, and its metadata {"folder": ...} the folder. Images whose ids are in the index already are
skipped, unless size or time of the file has changed: these, and all with --replace, are embedded
again and keep their metadata. Images that cannot be read are named and left out, and the exit
status is 1. --split=test (or train) first writes the images of the data set that the bundle was
trained on to the folder --images; --root says where that data set is.

--first=bits, or --first=64, makes a search in two stages: candidates by bits, or by the first 64
numbers, are compared by their whole vectors; `list` prints its measured recall. It stays until
`tune --graph`. An approximate search that misses the recall of `tune --recall` (0.95) is not used.

--import takes a Parquet file, or the folder of parts that `dmljax embed BUNDLE --images=...` fills.
If the file names its model, --bundle can be left out. Stored ids are skipped where parts are
imported, and an error where a file is. docs/index_search.md describes the files.
"""

import argparse
import functools
import json
import os
import unicodedata
from collections.abc import Callable, Sequence

from absl import logging

from dmljax import index as indexes
from dmljax.commands import index_fill
from dmljax.commands.parser import add_trust, refuse
from dmljax.hints import counted, hint, shown_bytes
from dmljax.index import Index, inputs

_NamesFn = Callable[[str], dict[str, list[str]]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("verb", nargs="?", help=", ".join(_VERBS))
    parser.add_argument("words", nargs="*", metavar="INDEX", help="index; ids or a file after it")
    parser.add_argument("--bundle", help="create, add, reindex: bundle that embeds")
    parser.add_argument("--images", help="create, add, reindex: folder or Parquet list of images")
    parser.add_argument(
        "--split", help="create, add, reindex: test or train: first write these images to --images"
    )
    add_trust(parser)
    parser.add_argument("--root", help="with --split: folder of the data set of the bundle")
    parser.add_argument(
        "--import",
        dest="source",
        help="create, add, reindex: Parquet file of vectors, or folder of parts",
    )
    parser.add_argument(
        "--replace", action="store_true", help="create, add, reindex: replace stored ids"
    )
    parser.add_argument(
        "--drop-missing", action="store_true", help="reindex: switch although items are missing"
    )
    parser.add_argument(
        "--not-in",
        metavar="FOLDER",
        action="append",
        help="remove: items that are no files of this folder, nor of another --not-in",
    )
    parser.add_argument(
        "--yes", action="store_true", help="remove --not-in: also more than half of all items"
    )
    parser.add_argument("--items", action="store_true", help="list: a line for each item")
    parser.add_argument("--graph", choices=("yes", "no"), help="tune: with or without a graph")
    parser.add_argument("--first", help="create, add, reindex, tune: bits, or a prefix such as 64")
    parser.add_argument("--recall", type=float, help="tune: the wanted recall@10, 0.95 by default")
    parser.add_argument("--compact", action="store_true", help="tune: give space back")
    for flag in ("--out", "--to", "--export"):  # of the form without a verb
        parser.add_argument(flag, help=argparse.SUPPRESS)
    for flag in ("--reindex", "--check"):
        parser.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--delete", action="append", default=[], help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace, extras: Sequence[str]) -> int:
    refuse("index", [word for word in extras if word.startswith("-")])
    # argparse leaves words after a flag among the extras.
    verb, words = arguments.verb, [*arguments.words, *extras]
    if verb is None:
        raise ValueError(f"index needs a verb: {', '.join(_VERBS)} (dmljax index --help)")
    if verb not in _VERBS:
        return _run_without_verb(arguments, words)
    run_fn, flags = _VERBS[verb]
    for name, value in vars(arguments).items():
        if value and name not in ("verb", "words", "verbose", *flags):
            flag = {"source": "import"}.get(name, name.replace("_", "-"))
            raise ValueError(f"--{flag} does not belong to `dmljax index {verb}` (see --help)")
    if not words:
        raise ValueError(f"`dmljax index {verb}` needs an index: a folder or postgresql://...")
    if len(words) > 1 and run_fn not in (_remove, _export):
        raise ValueError(f"{words[1]!r} is not known (see dmljax index --help)")
    return run_fn(arguments, *words)


def _run_without_verb(arguments: argparse.Namespace, words: list[str]) -> int:
    """The form before there were verbs: `dmljax index BUNDLE --images=... --out=INDEX`."""
    target, place = arguments.verb, arguments.out or arguments.to
    old_flags = ("out", "to", "export", "reindex", "check", "delete", "images", "source", "compact")
    is_old = any(getattr(arguments, flag) for flag in old_flags)
    if words or not (is_old or "://" in target or os.path.exists(target)):
        raise ValueError(f"index has no verb {target!r}{hint(target, _VERBS)}")
    fills = bool(arguments.images or arguments.source)
    if arguments.images and not place:
        raise ValueError("--out=INDEX is needed; or: dmljax index create INDEX --bundle=...")
    if fills and (arguments.delete or arguments.compact or arguments.export or arguments.check):
        raise ValueError("--delete, --compact, --check and --export are commands of their own")
    arguments.bundle = target if fills and place else None
    calls: list[tuple[str, list[str]]] = [
        (verb, [target, *operands])
        for verb, is_wanted, operands in (
            ("remove", arguments.delete, arguments.delete),
            ("tune", arguments.compact, []),
            ("export", arguments.export, [arguments.export]),
            ("check", arguments.check, []),
        )
        if is_wanted
    ]
    if fills:
        arguments.verb = "reindex" if arguments.reindex else "create"
        calls = [(arguments.verb, [place or target])]
    calls = calls or [("list", [target])]
    more = f" --bundle={target} ..." if arguments.bundle else ""
    verbs = "; ".join(f"dmljax index {verb} {words[0]}{more}" for verb, words in calls)
    logging.warning("`dmljax index` has verbs now, and the next version needs them: %s", verbs)
    return max(_VERBS[verb][0](arguments, *operands) for verb, operands in calls)


def _remove(arguments: argparse.Namespace, place: str, *ids: str) -> int:
    folders = arguments.not_in
    if bool(ids) == bool(folders):
        raise ValueError(
            f"`dmljax index remove {place}` needs ids, as `dmljax index list --items` shows them, "
            "or --not-in=FOLDER"
        )
    for folder in folders or ():
        if not os.path.isdir(folder):
            raise ValueError(f"--not-in={folder} is no folder")
    with indexes.open(place, write=True) as store:
        if folders:
            stored = [item.id for items in store.scan() for item in items]
            names_fn = functools.lru_cache(maxsize=1000)(_names_by_nfc)
            ids = tuple(x for x in stored if not any(_has_file(y, x, names_fn) for y in folders))
            if len(ids) > len(stored) / 2 and not arguments.yes:
                raise ValueError(
                    f"{len(ids):,} of {len(stored):,} items are no files of --not-in, such as "
                    f"{ids[0]}: give all folders that were indexed, or confirm it by --yes. "
                    "Nothing is removed"
                )
        store.delete(ids)
    print(f"deleted {counted(len(ids), 'item')}")
    return 0


def _has_file(folder: str, id: str, names_fn: _NamesFn) -> bool:
    """Whether the file is there. A folder that cannot be read now is an error."""
    try:
        os.stat(os.path.join(folder, id))
    except (FileNotFoundError, NotADirectoryError, ValueError):  # a zero byte is in no path
        # Ids are in NFC, and names on the disk may be in another form: macOS writes NFD.
        return not id.isascii() and _has_equivalent(folder, id, names_fn)
    return True


def _has_equivalent(folder: str, id: str, names_fn: _NamesFn) -> bool:
    """Whether there is a file whose path below the folder is the id, in any normal form."""
    name, _, rest = id.partition("/")
    paths = [os.path.join(folder, entry) for entry in names_fn(folder).get(name, ())]
    return any(not rest or _has_equivalent(path, rest, names_fn) for path in paths)


def _names_by_nfc(folder: str) -> dict[str, list[str]]:
    """The names of the files in a folder, by their normal form NFC."""
    names: dict[str, list[str]] = {}
    try:
        for name in os.listdir(folder):
            names.setdefault(unicodedata.normalize("NFC", name), []).append(name)
    except (FileNotFoundError, NotADirectoryError):
        pass
    return names


def _list(arguments: argparse.Namespace, place: str) -> int:
    with indexes.open(place) as store:
        if not arguments.items:
            _print_facts(store)
        for items in store.scan() if arguments.items else ():
            for item in items:
                print(f"{item.id}  {json.dumps(item.metadata, ensure_ascii=False)}")
    return 0


def _tune(arguments: argparse.Namespace, place: str) -> int:
    first = index_fill.first_stage(arguments.first)
    if first is not None and arguments.graph:
        raise ValueError("--first is a search without a graph: leave out --graph")
    with indexes.open(place, write=True) as store:
        if first is not None:
            inputs.check_first(first, store.dimension, store.similarity)
        if arguments.compact:
            before = store.facts()["bytes"]
            store.compact()
            now = store.facts()["bytes"]
            print(f"compacted: {shown_bytes(before)} before, {shown_bytes(now)} now")
        asked = (arguments.graph, first, arguments.recall)
        if any(value is not None for value in asked) or not arguments.compact:
            graph = {"yes": True, "no": False}.get(arguments.graph)
            store.build(approximate=graph, first=first, recall=arguments.recall)
        _print_facts(store)
    return 0


def _print_facts(store: Index) -> None:
    facts = store.facts()
    graph = facts.pop("approximate")
    facts["size"] = shown_bytes(facts.pop("bytes"))
    facts["search"] = "exact"
    if graph is not None:
        recall, items = f"{graph['recall@10']:.3f}", f"{graph['items']:,} items"
        facts["search"] = f"approximate, recall@10 {recall} measured on {items}"
        if recalls := graph.get("recalls"):
            kinds = ", ".join(f"{kind} {value:.3f}" for kind, value in recalls.items())
            facts["search"] += f" ({kinds} vectors)"
            if graph["recall@10"] < graph["wanted"]:
                facts["search"] += f"; below {graph['wanted']}, so every search is exact"
        if (first := graph.get("first")) is not None:
            by = "bits" if first == "bits" else f"the first {first} numbers"
            stages = f"{graph['candidates']:,} candidates by {by}, then whole vectors"
            facts["search"] += f"; {stages}"
    for name, value in facts.items():
        print(f"{name:12s} {value:,}" if isinstance(value, int) else f"{name:12s} {value}")


def _check(_: argparse.Namespace, place: str) -> int:
    with indexes.open(place) as store:
        problems = store.check()
        for problem in problems:
            print(problem)
        if not problems:
            print(f"ok: {counted(store.count(), 'item')}, every stored byte was read")
    return 1 if problems else 0


def _export(_: argparse.Namespace, place: str, *paths: str) -> int:
    if len(paths) != 1:
        raise ValueError(f"`dmljax index export {place}` needs one file: photos.parquet")
    from dmljax.index import parquet

    with indexes.open(place) as store:
        print(f"wrote {paths[0]}: {counted(parquet.export(store, paths[0]), 'item')}")
    return 0


_FILL = ("bundle", "images", "split", "root", "source", "replace", "trust_modules", "first")
# The function of every verb, and the flags that belong to it.
_VERBS: dict[str, tuple[Callable[..., int], tuple[str, ...]]] = {
    "create": (index_fill.fill, _FILL),
    "add": (index_fill.fill, _FILL),
    "reindex": (index_fill.fill, (*_FILL, "drop_missing")),
    "remove": (_remove, ("not_in", "yes")),
    "list": (_list, ("items",)),
    "tune": (_tune, ("graph", "compact", "first", "recall")),
    "check": (_check, ()),
    "export": (_export, ()),
}
