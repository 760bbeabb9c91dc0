"""Make an index of images or vectors, add to it, and look after it.

    dmljax index photos.bundle --images=collection/ --out=photos.index
    dmljax index photos.bundle --images=collection/ --to="postgresql://user@host/db?table=photos"
    dmljax index new.bundle --images=collection/ --out=photos.index --reindex
    dmljax index photos.bundle --split=test --images=collection/ --out=photos.index
    dmljax index photos.bundle --import=vectors.parquet --out=photos.index
    dmljax index photos.bundle --import=vectors/ --out=photos.index
    dmljax index photos.index                            facts: items, size, recall
    dmljax index photos.index --delete=cats/1.jpg --compact
    dmljax index photos.index --check
    dmljax index photos.index --export=photos.parquet

The id of an image is its path below the folder, and its metadata {"folder": ...} the folder. Images
whose ids are in the index already are skipped, so an interrupted command is simply run again;
--replace embeds them again and keeps their metadata. --split=test (or train) first writes the
images of the data set that the bundle was trained on to the folder --images; --root says where that
data set is. --import takes a Parquet file, or the folder of parts that `dmljax embed BUNDLE
--images=...` fills; of parts, stored ids are skipped too. --reindex fills an index of another
bundle beside the present one and then switches at once, if no item is missing from the new one;
--drop-missing switches also then. Images that cannot be read are named and left out, and the exit
status is 1. docs/index_search.md describes the files.
"""

from __future__ import annotations

import argparse
import collections
import os
import pathlib
import sys
import time
import unicodedata
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from dmljax.commands.parser import add_trust, refuse
from dmljax.index import Index, InvalidInput, create, inputs, source
from dmljax.index import open as open_index
from dmljax.index import reindex as reindex_beside

__all__ = ["add_arguments", "run"]

_COMMIT = 1024  # images that are added together
_REPORT_SECONDS = 10
_NAMED = 10  # unreadable images that are printed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", nargs="?", help="bundle (to add), or index (to look after)")
    parser.add_argument("--images", help="folder of images to add")
    parser.add_argument("--split", help="train or test: write these images to --images first")
    add_trust(parser)
    parser.add_argument("--root", help="with --split: where the data set of the bundle is")
    parser.add_argument("--import", dest="source", help="Parquet file or folder of parts to add")
    parser.add_argument("--out", help="index to make or to add to: a folder")
    parser.add_argument("--to", help="the same in PostgreSQL: postgresql://USER@HOST/DB?table=NAME")
    parser.add_argument("--replace", action="store_true", help="also add ids that exist, anew")
    parser.add_argument("--reindex", action="store_true", help="replace an index of another model")
    parser.add_argument(
        "--drop-missing", action="store_true", help="with --reindex: items may be missing"
    )
    parser.add_argument(
        "--delete", action="append", default=[], metavar="ID", help="delete an item"
    )
    parser.add_argument("--compact", action="store_true", help="give the space of deletions back")
    parser.add_argument("--check", action="store_true", help="read everything; status 1 if damaged")
    parser.add_argument("--export", help="Parquet file to write")


def run(arguments: argparse.Namespace, extras: Sequence[str]) -> int:
    refuse("index", extras)
    if arguments.target is None:
        raise ValueError("index needs a bundle to add images, or an index (dmljax index --help)")
    place = arguments.out or arguments.to
    upkeep = arguments.delete or arguments.compact or arguments.check or arguments.export
    if arguments.drop_missing and not arguments.reindex:
        raise ValueError("--drop-missing needs --reindex")
    if arguments.root and not arguments.split:
        raise ValueError("--root needs --split=test or --split=train")
    if arguments.split and not arguments.images:
        raise ValueError(
            "--split writes images of the bundle's data set: say where with --images=FOLDER"
        )
    if arguments.split not in (None, "train", "test"):
        raise ValueError(f"--split={arguments.split} is unknown: choose train or test")
    if arguments.images and arguments.source:
        raise ValueError("--images and --import are two commands: give one of them")
    if arguments.images or (arguments.source and place):
        if upkeep:
            raise ValueError("--delete, --compact, --check and --export are commands of their own")
        if arguments.out and arguments.to:
            raise ValueError("--out and --to are two places: give one of them")
        if not place:
            raise ValueError(
                "--out=FOLDER (or --to=postgresql://...) is needed: where the index is"
            )
        return _add(arguments, place)
    if place or arguments.reindex:
        raise ValueError("--out, --to and --reindex need --images=FOLDER or --import=FILE.parquet")
    if arguments.source:
        with _open_for(arguments.target, arguments.source) as store:
            return _add_vectors(store, arguments.source, replace=arguments.replace)
    return _look_after(arguments)


def _open_for(place: str, source: str) -> Index:
    """The index to which a Parquet file is added; a new one if the file names its model."""
    from dmljax.index import parquet

    about = parquet.about(source)
    try:
        return open_index(place, model=about.model, write=True)
    except FileNotFoundError:
        if not _is_free(place):
            raise
    if about.model is None or about.similarity is None:
        raise ValueError(
            f"{source} does not say which model made its vectors: "
            f"dmljax index BUNDLE --import={source} --out={place}"
        )
    return create(place, model=about.model, dimension=about.dimension, similarity=about.similarity)


def _is_free(place: str) -> bool:
    return place.startswith("postgres") or not pathlib.Path(place).exists()


def _look_after(arguments: argparse.Namespace) -> int:
    write = bool(arguments.delete or arguments.compact)
    with open_index(arguments.target, write=write) as store:
        if arguments.delete:
            store.delete(arguments.delete)
            print(f"deleted {_number(len(arguments.delete), 'item')}")
        if arguments.compact:
            before = store.facts()["bytes"]
            store.compact()
            print(f"compacted: {_size(before)} before, {_size(store.facts()['bytes'])} now")
        if arguments.export:
            from dmljax.index import parquet

            count = parquet.export(store, arguments.export)
            print(f"wrote {arguments.export}: {_number(count, 'item')}")
        if arguments.check:
            problems = store.check()
            for problem in problems:
                print(problem)
            if problems:
                return 1
            print(f"ok: {_number(store.count(), 'item')}, every stored byte was read")
        if not (write or arguments.export or arguments.check):
            _print_facts(store)
    return 0


def _print_facts(store: Index) -> None:
    facts = store.facts()
    graph = facts.pop("approximate")
    facts["size"] = _size(facts.pop("bytes"))
    for name, value in facts.items():
        print(f"{name:12s} {value:,}" if isinstance(value, int) else f"{name:12s} {value}")
    if graph is None:
        print("search       exact")
    else:
        print(
            f"search       approximate, recall@10 {graph['recall@10']:.3f} measured on "
            f"{graph['items']:,} items"
        )


def _add(arguments: argparse.Namespace, place: str) -> int:
    from dmljax import bundle as bundles

    bundle = bundles.load(arguments.target)
    if arguments.split:
        _write_split(bundle, arguments)
    images = _images(arguments.images) if arguments.images else []
    if arguments.source:
        _check_source(arguments.source, bundle)
    store, previous = _open(place, bundle, reindex=arguments.reindex)
    try:
        if arguments.source:
            status = _add_vectors(store, arguments.source, replace=arguments.replace)
        else:
            status = _add_images(
                store, bundle, images, replace=arguments.replace, previous=previous
            )
        if previous is not None:
            count = previous.count()
            if count and not store.count():
                raise ValueError(
                    f"nothing could be added: {place} keeps its {_number(count, 'item')} of the "
                    "previous model; correct --images or --import and repeat the command"
                )
            if not arguments.drop_missing:
                _check_complete(store, previous, place)
            store.switch()
            print(f"{place} now has {_number(store.count(), 'item')}; it had {count:,}")
        if arguments.images:
            source.record(place, arguments.images)
    finally:
        if previous is not None:
            previous.close()
        store.close()
    return status


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


def _open(place: str, bundle: Any, *, reindex: bool) -> tuple[Index, Index | None]:
    """The index to add to, and the one that it will replace."""
    model = bundle.digest
    of_bundle = {"model": model, "dimension": bundle.dimension, "similarity": bundle.similarity}
    if reindex:
        previous = open_index(place)
        if previous.model == model:
            previous.close()
            raise ValueError(f"{place} holds vectors of this bundle already: leave out --reindex")
        try:
            return reindex_beside(place, **of_bundle), previous
        except BaseException:
            previous.close()
            raise
    try:
        return open_index(place, model=model, write=True), None
    except FileNotFoundError:
        if not _is_free(place):
            raise
        return create(place, **of_bundle), None


def _check_complete(store: Index, previous: Index, place: str) -> None:
    """Refuses to replace an index by one in which some of its items are missing."""
    count, first = 0, ""
    for items in previous.scan():
        ids = [item.id for item in items]
        is_stored = store.contains(ids)
        missing = [name for name, is_in in zip(ids, is_stored, strict=True) if not is_in]
        first = first or next(iter(missing), "")
        count += len(missing)
    if count:
        raise ValueError(
            f"{_number(count, 'item')} of {place} would be lost, such as {first!r}: {place} stays "
            "as it was. Repeat the command with images or vectors of all items, or with "
            "--drop-missing"
        )


def _check_source(source: str, bundle: Any) -> None:
    """Refuses vectors of another model, before an index is made."""
    from dmljax.index import parquet

    model, _, dimension = parquet.about(source)
    if model not in (None, bundle.digest):
        raise ValueError(f"{source} holds vectors of the model {model}, not of {bundle.digest}")
    if dimension != bundle.dimension:
        raise ValueError(f"{source} has {dimension} dimensions, the bundle {bundle.dimension}")


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
    store.build()
    more = f", {skipped:,} were there already" if skipped else ""
    added, total = _number(count, "vector"), _number(store.count(), "item")
    print(f"added {added}{more}; {store.place} has {total}")
    return 0


class _Image(NamedTuple):
    """A file and the id that it gets."""

    path: str
    id: str
    folder: str


def _images(root: str) -> list[_Image]:
    from dmljax.data import locate

    if not os.path.isdir(root):
        raise FileNotFoundError(f"--images={root} is not a folder")
    images = []
    for path in locate.image_paths(pathlib.Path(root)):
        name = unicodedata.normalize("NFC", pathlib.Path(path).relative_to(root).as_posix())
        images.append(_Image(path, name, name.rpartition("/")[0]))
    if not images:
        suffixes = " ".join(locate.IMAGE_SUFFIXES)
        raise FileNotFoundError(f"{root} has no images; known suffixes are {suffixes}")
    return images


def _add_images(
    store: Index, bundle: Any, files: list[_Image], *, replace: bool, previous: Index | None
) -> int:
    unreadable: list[str] = []
    images, ids = [], set()
    for image in files:
        try:
            inputs.check_ids([image.id])
        except InvalidInput as error:
            unreadable.append(str(error))
            continue
        if image.id in ids:
            unreadable.append(f"{image.path}: another file has the same name in normal form NFC")
            continue
        ids.add(image.id)
        images.append(image)
    skipped = 0
    if not replace and images:
        exists = store.contains([image.id for image in images])
        skipped = sum(exists)
        images = [image for image, is_in in zip(images, exists, strict=True) if not is_in]
    start = reported = time.monotonic()
    added, done = 0, 0
    rows: list[tuple[_Image, np.ndarray]] = []
    for readable, vectors, problems in _embedded(bundle, images):
        unreadable += problems
        done += len(readable) + len(problems)
        rows += zip(readable, vectors, strict=True)
        if len(rows) >= _COMMIT or done == len(images):
            added += _commit(store, rows, previous)
            rows = []
        if time.monotonic() - reported > _REPORT_SECONDS:
            reported = time.monotonic()
            rate = done / (reported - start)
            print(f"{done:,} of {len(images):,} images, {rate:.0f} a second", file=sys.stderr)
    store.build()
    more = f", {skipped:,} were there already" if skipped else ""
    print(f"added {_number(added, 'image')}{more}; {store.place} has {store.count():,}")
    for problem in unreadable[:_NAMED]:
        print(f"left out: {problem}", file=sys.stderr)
    if unreadable:
        print(f"{_number(len(unreadable), 'image')} left out", file=sys.stderr)
    return 1 if unreadable else 0


def _commit(store: Index, rows: list[tuple[_Image, np.ndarray]], previous: Index | None) -> int:
    """Adds embedded images. Those that exist already keep their metadata."""
    if not rows:
        return 0
    ids = [image.id for image, _ in rows]
    metadata = {image.id: {"folder": image.folder} for image, _ in rows}
    for index in (previous, store):
        if index is not None:
            stored = [name for name, is_in in zip(ids, index.contains(ids), strict=True) if is_in]
            metadata |= {item.id: item.metadata for item in index.get(stored)}
    vectors = np.stack([vector for _, vector in rows])
    store.add(ids, vectors, [metadata[name] for name in ids], replace=True)
    return len(ids)


def _embedded(
    bundle: Any, images: Sequence[_Image]
) -> Iterator[tuple[list[_Image], np.ndarray, list[str]]]:
    """Batches of images with their embeddings, and what is wrong with others.

    Threads decode the next batches while the net computes.
    """
    size = bundle.batch_sizes[-1]
    batches = collections.deque(images[i : i + size] for i in range(0, len(images), size))
    pending: collections.deque[list[tuple[_Image, Future]]] = collections.deque()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        while batches or pending:
            while batches and len(pending) < 2:
                pending.append([(x, pool.submit(_prepare, bundle, x)) for x in batches.popleft()])
            results = [(image, future.result()) for image, future in pending.popleft()]
            readable = [image for image, result in results if not isinstance(result, str)]
            arrays = [result for _, result in results if not isinstance(result, str)]
            problems = [result for _, result in results if isinstance(result, str)]
            vectors = bundle.embed_prepared(np.stack(arrays)) if arrays else np.zeros((0, 1))
            yield readable, vectors, problems


def _prepare(bundle: Any, image: _Image) -> np.ndarray | str:
    try:
        return bundle.prepare(image.path)
    except (ValueError, OSError) as error:
        text = " ".join(str(error).split())
        return text if image.path in text else f"{image.path}: {text}"


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
