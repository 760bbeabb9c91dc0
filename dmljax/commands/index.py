"""Create, fill, check and export an index of images or vectors.

    dmljax index create photos.index --bundle=photos.bundle --images=collection/
    dmljax index create "postgresql://user@host/db?table=photos" --bundle=... --images=...
    dmljax index create photos.index --bundle=photos.bundle --split=test --images=collection/
    dmljax index create photos.index --bundle=photos.bundle --import=vectors/
    dmljax index add photos.index --bundle=photos.bundle --images=more/
    dmljax index reindex photos.index --bundle=new.bundle --images=collection/
    dmljax index remove photos.index cats/1.jpg cats/2.jpg
    dmljax index remove photos.index --not-in=collection/      items without a file
    dmljax index list photos.index                       count, model, size; --items lists all ids
    dmljax index compact photos.index                    frees the space of removed items
    dmljax index check photos.index
    dmljax index export photos.index photos.parquet

An index is a folder or an address postgresql://. `create` makes an index, or continues one of the
same bundle after an interruption. `add` needs an existing index. `reindex` fills an index of
another bundle next to the present one and then switches to it atomically, unless items are missing
from the new one; --drop-missing switches in any case. docs/index_search.md describes which images
are skipped, embedded again or left out, and the files of --images and --import.
"""

import argparse
import dataclasses
import itertools
import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dmljax import index as indexes
from dmljax.commands.parser import add_fields, add_trust, flag, load_bundle, refuse
from dmljax.files import machine
from dmljax.hints import check_all, check_known, counted, shown_bytes
from dmljax.index import fill

_FILL = "create, add, reindex"


@dataclasses.dataclass(frozen=True)
class Flags:
    """Flags of all verbs; the help begins with the verbs that a flag belongs to."""

    bundle: str | None = flag(None, f"{_FILL}: bundle that embeds the images")
    images: str | None = flag(None, f"{_FILL}: folder or Parquet list of images")
    split: str | None = flag(None, f"{_FILL}: write this split, test or train, to --images first")
    root: str | None = flag(None, "with --split: folder of the data set of the bundle")
    replace: bool = flag(False, f"{_FILL}: overwrite items with the same ids")
    drop_missing: bool = flag(False, "reindex: switch even if items are missing from the new index")
    not_in: tuple[str, ...] = flag(
        (), "remove: items without a file in any --not-in folder; may be repeated", metavar="FOLDER"
    )
    yes: bool = flag(False, "remove --not-in: confirm that more than half of the items go")
    items: bool = flag(False, "list: print one line per item")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("verb", nargs="?", help=", ".join(_VERBS))
    parser.add_argument("words", nargs="*", metavar="INDEX", help="index; then ids, or a file")
    text = f"{_FILL}: Parquet file or folder of vectors"
    parser.add_argument("--import", dest="source", metavar="FILE", help=text)
    add_fields(parser, Flags)
    add_trust(parser)


def run(arguments: argparse.Namespace, extras: Sequence[str]) -> int:
    refuse("index", [word for word in extras if word.startswith("-")])
    # argparse leaves words after a flag among the extras.
    verb, words = arguments.verb, [*arguments.words, *extras]
    if verb is None:
        raise ValueError(f"index needs a verb: {', '.join(_VERBS)} (dmljax index --help)")
    check_known("index does not know the verb", [verb], _VERBS)
    run_fn, flags = _VERBS[verb]
    wrong = sorted(set(arguments.given) - {"--verbose", *flags})
    what = f"`dmljax index {verb}`"
    check_all(
        {
            f"{wrong and wrong[0]} does not belong to {what} (see --help)": bool(wrong),
            f"{what} needs an index: a folder or postgresql://...": not words,
        }
    )
    if len(words) > 1 and run_fn not in (_remove, _export):
        refuse("index", words[1:])
    return run_fn(arguments, *words)


def _fill(arguments: argparse.Namespace, place: str) -> int:
    images, source, split = arguments.images, arguments.source, arguments.split
    check_all(
        {
            "give either --images=FOLDER, or --import=FILE.parquet": bool(images) == bool(source),
            "--split writes images of the bundle's data set: say where with --images=FOLDER; "
            "--root needs --split": bool((split and not images) or (arguments.root and not split)),
            "--bundle=BUNDLE is needed: it embeds the images": not arguments.bundle
            and bool(images or arguments.verb == "reindex"),
        }
    )
    bundle = load_bundle(arguments.bundle) if arguments.bundle else None
    if split:
        from dmljax.commands import dataset_flags

        dataset_flags.write_split(bundle, split, arguments.root, images)
    with ThreadPoolExecutor(machine.core_count()) as pool:
        content = _images(images, bundle, pool) if images else source
        words = place, content, fill.settings_of(source, bundle)
        if arguments.verb == "reindex":
            drop_missing = arguments.drop_missing
            return fill.reindex(*words, replace=arguments.replace, drop_missing=drop_missing)
        create = arguments.verb == "create"
        return fill.add(*words, replace=arguments.replace, create=create)


def _images(place: str, bundle: Any, pool: ThreadPoolExecutor) -> fill.Images:
    from dmljax.bundle import collection

    images = collection.open_collection(place)
    if images.skipped_columns:
        columns = ", ".join(images.skipped_columns)
        print(f"{place}: not text, numbers or bools, so not metadata: {columns}", file=sys.stderr)

    def embed(chunk: list) -> tuple:
        return collection.embedded(bundle, chunk, 0, pool)

    path = str(pathlib.Path(place).resolve())
    return fill.Images(path, images.count, images.read_fn, embed, images.path_note)


def _remove(arguments: argparse.Namespace, place: str, *ids: str) -> int:
    folders = arguments.not_in
    if bool(ids) == bool(folders):
        raise ValueError(
            f"`dmljax index remove {place}` needs ids, as `dmljax index list --items` shows them, "
            "or --not-in=FOLDER"
        )
    with indexes.open(place, write=True) as store:
        if folders:
            stored = [item.id for items in store.scan() for item in items]
            ids = tuple(_without_file(stored, folders))
            if len(ids) > len(stored) / 2 and not arguments.yes:
                raise ValueError(
                    f"{len(ids):,} of {len(stored):,} items have no file in --not-in, such as "
                    f"{ids[0]}: give all folders that were indexed, or confirm it by --yes. "
                    "Nothing is removed"
                )
        store.delete(ids)
    print(f"deleted {counted(len(ids), 'item')}")
    return 0


def _without_file(ids: list[str], folders: list[str]) -> Iterator[str]:
    """Yields the ids that are not the path of a file below one of the folders."""
    from dmljax.bundle import collection

    for folder in folders:
        if not os.path.isdir(folder):
            raise ValueError(f"--not-in={folder} is not a folder")
    # Ids are in the normal form NFC, and names on the disk may be in another one: macOS writes NFD.
    names = {image.id for folder in folders for image in collection.images_below(folder)}
    for name in ids:
        if name not in names and not any(os.path.exists(os.path.join(x, name)) for x in folders):
            yield name


def _list(arguments: argparse.Namespace, place: str) -> int:
    with indexes.open(place) as store:
        if arguments.items:
            for item in itertools.chain.from_iterable(store.scan()):
                print(f"{item.id}  {json.dumps(item.metadata, ensure_ascii=False)}")
            return 0
        facts = store.facts()
        facts["size"] = shown_bytes(facts.pop("bytes"))
        for name, value in facts.items():
            print(f"{name:12s} {value:,}" if isinstance(value, int) else f"{name:12s} {value}")
    return 0


def _compact(_: argparse.Namespace, place: str) -> int:
    with indexes.open(place, write=True) as store:
        before = store.facts()["bytes"]
        store.compact()
        now = shown_bytes(store.facts()["bytes"])
        print(f"compacted: {shown_bytes(before)} before, {now} now")
    return 0


def _check(_: argparse.Namespace, place: str) -> int:
    with indexes.open(place) as store:
        problems = store.check()
        ok = f"ok: {counted(store.count(), 'item')}, every stored byte was read"
    print("\n".join(problems or [ok]))
    return 1 if problems else 0


def _export(_: argparse.Namespace, place: str, *paths: str) -> int:
    if len(paths) != 1:
        raise ValueError(f"`dmljax index export {place}` needs one file: photos.parquet")
    from dmljax.index import parquet

    with indexes.open(place) as store:
        print(f"wrote {paths[0]}: {counted(parquet.export(store, paths[0]), 'item')}")
    return 0


_FLAGS = ("--bundle", "--images", "--split", "--root", "--import", "--replace", "--trust-modules")
# The function of every verb, and the flags that belong to it.
_VERBS: dict[str, tuple[Callable[..., int], tuple[str, ...]]] = {
    "create": (_fill, _FLAGS),
    "add": (_fill, _FLAGS),
    "reindex": (_fill, (*_FLAGS, "--drop-missing")),
    "remove": (_remove, ("--not-in", "--yes")),
    "list": (_list, ("--items",)),
    "compact": (_compact, ()),
    "check": (_check, ()),
    "export": (_export, ()),
}
