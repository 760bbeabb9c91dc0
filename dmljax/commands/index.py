"""Make an index of images or vectors, add to it, and look after it.

    dmljax index create photos.index --bundle=photos.bundle --images=collection/
    dmljax index create "postgresql://user@host/db?table=photos" --bundle=... --images=...
    dmljax index create photos.index --bundle=photos.bundle --split=test --images=collection/
    dmljax index create photos.index --bundle=photos.bundle --import=vectors/
    dmljax index add photos.index --bundle=photos.bundle --images=more/
    dmljax index reindex photos.index --bundle=new.bundle --images=collection/
    dmljax index remove photos.index cats/1.jpg cats/2.jpg
    dmljax index list photos.index                       items, size, recall; --items lists all ids
    dmljax index tune photos.index --compact             the graph, and the space of removed items
    dmljax index check photos.index
    dmljax index export photos.index photos.parquet

An index is a folder or an address postgresql://. `create` makes one, and continues one of the same
bundle: an interrupted command is simply run again. `add` needs an index that exists. `reindex`
fills an index of another bundle beside the present one and then switches at once, if no item is
missing from the new one; with --drop-missing it switches in any case.

--images is a folder, or a Parquet file with a column `path` and perhaps `id`. The id of an image is
its path below the folder, and its metadata {"folder": ...} the folder. Images whose ids are in the
index already are skipped; --replace embeds them again and keeps their metadata. Images that cannot
be read are named and left out, and the exit status is 1. --split=test (or train) first writes the
images of the data set that the bundle was trained on to the folder --images; --root says where that
data set is. --import takes a Parquet file, or the folder of parts that `dmljax embed BUNDLE
--images=...` fills. If the file names its model, --bundle can be left out. Stored ids are skipped
where parts are imported, and an error where a file is. docs/index_search.md describes the files.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from absl import logging

from dmljax import index as indexes
from dmljax.commands.parser import add_trust, refuse
from dmljax.files import cores
from dmljax.hints import hint
from dmljax.index import Index, InvalidInput, inputs, source

__all__ = ["add_arguments", "run"]

_CHUNK = 1024  # images that are added together
_REPORT_SECONDS = 10
_MOST_PRINTED = 10  # images that were left out


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("verb", nargs="?", help=", ".join(_VERBS))
    parser.add_argument("words", nargs="*", metavar="INDEX", help="index; ids or a file after it")
    parser.add_argument("--bundle", help="create, add, reindex: the bundle that embeds")
    parser.add_argument("--images", help="the same: folder or Parquet list of images")
    parser.add_argument("--split", help="the same: write the train or test images to --images")
    add_trust(parser)
    parser.add_argument("--root", help="with --split: where the data set of the bundle is")
    parser.add_argument("--import", dest="source", help="the same: Parquet file or folder of parts")
    parser.add_argument("--replace", action="store_true", help="the same: also ids that exist")
    parser.add_argument("--drop-missing", action="store_true", help="reindex: items may be lost")
    parser.add_argument("--items", action="store_true", help="list: a line for each item")
    parser.add_argument("--graph", choices=("yes", "no"), help="tune: with or without a graph")
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


def _fill(arguments: argparse.Namespace, place: str) -> int:
    """Adds images or vectors to an index: a new one, the present one, or the one after it."""
    if bool(arguments.images) == bool(arguments.source):
        raise ValueError("give either --images=FOLDER, or --import=FILE.parquet")
    if arguments.root and not arguments.split:
        raise ValueError("--root needs --split=test or --split=train")
    if arguments.split and not arguments.images:
        raise ValueError(
            "--split writes images of the bundle's data set: say where with --images=FOLDER"
        )
    if arguments.split not in (None, "train", "test"):
        raise ValueError(f"--split={arguments.split} is unknown: choose train or test")
    if not arguments.bundle and (arguments.images or arguments.verb == "reindex"):
        raise ValueError("--bundle=BUNDLE is needed: it embeds the images")
    bundle = images = previous = None
    if arguments.bundle:
        from dmljax import bundle as bundles

        bundle = bundles.load(arguments.bundle)
    if arguments.split:
        _write_split(bundle, arguments)
    if arguments.images:
        from dmljax.bundle import collection

        images = collection.open_collection(arguments.images)
    settings = _settings(bundle, arguments.source)
    with contextlib.ExitStack() as stack:
        if arguments.verb == "reindex":
            previous = stack.enter_context(indexes.open(place))
            if previous.model == settings["model"]:
                raise ValueError(
                    f"{place} holds vectors of this bundle already: dmljax index add {place}"
                )
            store = indexes.reindex(place, **settings)
        else:
            store = _open(arguments, place, settings)
        stack.enter_context(store)
        if bundle is None or images is None:
            status = _add_vectors(store, arguments.source, replace=arguments.replace)
        else:
            status = _add_images(store, bundle, images, arguments.replace, previous)
        if previous is not None:
            _check_complete(store, previous, drop_missing=arguments.drop_missing)
            store.switch()
            total = _number(store.count(), "item")
            print(f"{place} now has {total}; it had {previous.count():,}")
        if arguments.images and os.path.isdir(arguments.images):
            source.record(place, arguments.images)
    return status


def _open(arguments: argparse.Namespace, place: str, settings: dict[str, Any]) -> Index:
    """The index to add to; `create` makes it if it does not exist."""
    try:
        return indexes.open(place, model=settings["model"], write=True)
    except FileNotFoundError:
        if arguments.verb == "add":
            raise
    if None in settings.values():
        raise ValueError(
            f"{arguments.source} does not say which model made its vectors: "
            f"dmljax index create {place} --bundle=BUNDLE --import={arguments.source}"
        )
    return indexes.create(place, **settings)


def _settings(bundle: Any, source: str | None) -> dict[str, Any]:
    """What an index is made for, from the bundle or from the file to import."""
    model = dimension = similarity = None
    if source is not None:
        from dmljax.index import parquet

        model, similarity, dimension = parquet.about(source)
    if bundle is not None:
        if model not in (None, bundle.digest):
            raise ValueError(f"{source} holds vectors of the model {model}, not of {bundle.digest}")
        if dimension not in (None, bundle.dimension):
            raise ValueError(f"{source} has {dimension} dimensions, the bundle {bundle.dimension}")
        model, dimension, similarity = bundle.digest, bundle.dimension, bundle.similarity
    return {"model": model, "dimension": dimension, "similarity": similarity}


def _write_split(bundle: Any, arguments: argparse.Namespace) -> None:
    """Writes the images of a split of the data set in the bundle's config to a folder."""
    from dmljax.bundle import files
    from dmljax.commands import dataset_flags
    from dmljax.data import image_files

    spec = files.read_json(bundle.folder, bundle.manifest, files.CONFIG)["dataset"]
    if arguments.root:
        spec["path" if "path" in spec else "root"] = arguments.root
    try:
        splits = dataset_flags.load(spec)
    except (ValueError, OSError) as error:
        hint = "" if arguments.root else " (a bundle keeps no paths: here it is --root=PATH)"
        raise ValueError(f"{error}{hint}") from None
    split = getattr(splits, arguments.split)
    about = {"dataset": spec, "split": arguments.split}
    try:
        count = image_files.write(split, arguments.images, about=about)
    except OSError as error:
        reason = error.strerror or error
        raise OSError(f"--images={arguments.images} cannot be written: {reason}") from None
    print(f"wrote {_number(count, 'image')} to {arguments.images}")


def _check_complete(store: Index, previous: Index, *, drop_missing: bool) -> None:
    """Refuses to replace an index by one in which some of its items are missing."""
    place, total = previous.place, previous.count()
    if total and not store.count():
        raise ValueError(
            f"nothing could be added: {place} keeps its {_number(total, 'item')} of the previous "
            "model; correct --images or --import and repeat the command"
        )
    missing: list[str] = []
    for items in () if drop_missing else previous.scan():
        ids = [item.id for item in items]
        stored = store.contains(ids)
        missing += [name for name, is_stored in zip(ids, stored, strict=True) if not is_stored]
    if missing:
        raise ValueError(
            f"{_number(len(missing), 'item')} of {place} would be lost, such as {missing[0]!r}: "
            f"{place} stays as it was. Repeat the command with images or vectors of all items, or "
            "with --drop-missing"
        )


def _add_vectors(store: Index, source: str, *, replace: bool) -> int:
    from dmljax.index import parquet

    count = skipped = 0
    for ids, vectors, metadata in parquet.read(source):
        if os.path.isdir(source) and not replace:  # an interrupted command is simply run again
            exists = np.array(store.contains(ids), bool)
            skipped += int(exists.sum())
            new = np.flatnonzero(~exists)
            ids, vectors = [ids[i] for i in new], vectors[new]
            metadata = [metadata[i] for i in new]
        if ids:
            store.add(ids, vectors, metadata, replace=replace)
        count += len(ids)
    _report(store, count, "vector", skipped)
    return 0


def _report(store: Index, count: int, noun: str, skipped: int) -> None:
    store.build()
    more = f", {skipped:,} were there already" if skipped else ""
    total = _number(store.count(), "item")
    print(f"added {_number(count, noun)}{more}; {store.place} has {total}")


def _add_images(
    store: Index, bundle: Any, images: Any, replace: bool, previous: Index | None
) -> int:
    """Embeds the images of a collection and adds them, some at a time."""
    from dmljax.bundle import collection

    left_out: list[str] = []
    ids_so_far: set[str] = set()
    added = skipped = 0
    start = reported = time.monotonic()
    with ThreadPoolExecutor(cores.count()) as pool:
        for first in range(0, images.count, _CHUNK):
            rows = range(first, min(first + _CHUNK, images.count))
            chunk = [x for x in images.read_fn(rows) if _is_new(x, ids_so_far, left_out)]
            if not replace:
                exists = store.contains([image.id for image in chunk])
                skipped += sum(exists)
                chunk = [image for image, stored in zip(chunk, exists, strict=True) if not stored]
            ids, vectors, problems = collection.embedded(bundle, chunk, 0, pool)
            left_out += [x if name in x else f"{name}: {x}" for name, x in problems]
            if ids:
                store.add(ids, vectors, _metadata(ids, store, previous), replace=True)
            added += len(ids)
            if time.monotonic() - reported > _REPORT_SECONDS:
                reported = time.monotonic()
                rate = f"{rows.stop / (reported - start):.0f} a second"
                print(f"{rows.stop:,} of {images.count:,} images, {rate}", file=sys.stderr)
    _report(store, added, "image", skipped)
    for problem in left_out[:_MOST_PRINTED]:
        print(f"left out: {problem}", file=sys.stderr)
    if left_out:
        print(f"{_number(len(left_out), 'image')} left out", file=sys.stderr)
    return 1 if left_out else 0


def _is_new(image: Any, ids_so_far: set[str], left_out: list[str]) -> bool:
    """Whether an image can be added under its id; if not, `left_out` gets the reason."""
    try:
        inputs.check_ids([image.id])
    except InvalidInput as error:
        left_out.append(str(error))
        return False
    if image.id in ids_so_far:
        left_out.append(f"{image.path}: another image has the same id, {image.id}")
        return False
    ids_so_far.add(image.id)
    return True


def _metadata(ids: list[str], store: Index, previous: Index | None) -> list[dict[str, Any]]:
    """The metadata of images: the folder, or what the index or the previous one says."""
    metadata = {name: {"folder": name.rpartition("/")[0]} for name in ids}
    for index in (previous, store):
        if index is not None:
            stored = [name for name, is_in in zip(ids, index.contains(ids), strict=True) if is_in]
            metadata |= {item.id: item.metadata for item in index.get(stored)}
    return list(metadata.values())


def _remove(_: argparse.Namespace, place: str, *ids: str) -> int:
    if not ids:
        raise ValueError(f"`dmljax index remove {place}` needs ids: dmljax index list --items")
    with indexes.open(place, write=True) as store:
        store.delete(ids)
    print(f"deleted {_number(len(ids), 'item')}")
    return 0


def _list(arguments: argparse.Namespace, place: str) -> int:
    with indexes.open(place) as store:
        if not arguments.items:
            _print_facts(store)
        for items in store.scan() if arguments.items else ():
            for item in items:
                print(f"{item.id}  {json.dumps(item.metadata, ensure_ascii=False)}")
    return 0


def _tune(arguments: argparse.Namespace, place: str) -> int:
    with indexes.open(place, write=True) as store:
        if arguments.compact:
            before = store.facts()["bytes"]
            store.compact()
            print(f"compacted: {_size(before)} before, {_size(store.facts()['bytes'])} now")
        if arguments.graph or not arguments.compact:
            store.build(approximate={"yes": True, "no": False}.get(arguments.graph))
        _print_facts(store)
    return 0


def _print_facts(store: Index) -> None:
    facts = store.facts()
    graph = facts.pop("approximate")
    facts["size"] = _size(facts.pop("bytes"))
    facts["search"] = (
        "exact"
        if graph is None
        else (
            f"approximate, recall@10 {graph['recall@10']:.3f} measured on {graph['items']:,} items"
        )
    )
    for name, value in facts.items():
        print(f"{name:12s} {value:,}" if isinstance(value, int) else f"{name:12s} {value}")


def _check(_: argparse.Namespace, place: str) -> int:
    with indexes.open(place) as store:
        problems = store.check()
        for problem in problems:
            print(problem)
        if not problems:
            print(f"ok: {_number(store.count(), 'item')}, every stored byte was read")
    return 1 if problems else 0


def _export(_: argparse.Namespace, place: str, *paths: str) -> int:
    if len(paths) != 1:
        raise ValueError(f"`dmljax index export {place}` needs one file: photos.parquet")
    from dmljax.index import parquet

    with indexes.open(place) as store:
        print(f"wrote {paths[0]}: {_number(parquet.export(store, paths[0]), 'item')}")
    return 0


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


_FILL = ("bundle", "images", "split", "root", "source", "replace", "trust_modules")
# The function of every verb, and the flags that belong to it.
_VERBS: dict[str, tuple[Callable[..., int], tuple[str, ...]]] = {
    "create": (_fill, _FILL),
    "add": (_fill, _FILL),
    "reindex": (_fill, (*_FILL, "drop_missing")),
    "remove": (_remove, ()),
    "list": (_list, ("items",)),
    "tune": (_tune, ("graph", "compact")),
    "check": (_check, ()),
    "export": (_export, ()),
}
