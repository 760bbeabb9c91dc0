"""Fills an index with images or vectors; repeated after an interruption, it continues.

Stored ids are skipped, and images that cannot be added are named.
"""

import contextlib
import itertools
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from dmljax import index as indexes
from dmljax.hints import counted
from dmljax.index import DuplicateId, Index, InvalidInput, inputs, parquet
from dmljax.index.base import File
from dmljax.index.nearest import SIMILARITIES

_CHUNK = 1024  # images that are added together
_REPORT_SECONDS = 10
_MOST_PRINTED = 10  # images that were left out


class Images(NamedTuple):
    """Images in a fixed order, and how to embed them."""

    place: str  # the absolute path of their folder or list
    total: int
    read_fn: Callable[[range], list[Any]]  # of rows: images with id, path and metadata
    embed_fn: Callable[[list[Any]], tuple[list[str], np.ndarray, list[tuple[str, str]]]]
    """Returns ids and vectors of images, and for others the id and what is wrong with it."""
    path_note: str = ""  # where relative paths begin

    def chunks(self) -> Iterator[range]:
        for start in range(0, self.total, _CHUNK):
            yield range(start, min(start + _CHUNK, self.total))


def settings_of(source: str | None, bundle: Any) -> tuple[Any, Any, Any]:
    """Returns model, dimension and similarity of a bundle and of a file of vectors."""
    file = parquet.About(None, None, 0) if source is None else parquet.about(source)
    if bundle is None:
        return file.model, file.dimension, file.similarity
    expected = bundle.digest, bundle.dimension
    if source is not None and (file.model or bundle.digest, file.dimension) != expected:
        raise ValueError(
            f"{source} holds vectors of the model {file.model} with {file.dimension} dimensions, "
            f"not of {bundle.digest} with {bundle.dimension}"
        )
    return bundle.digest, bundle.dimension, bundle.similarity


def add(place: str, source: Images | str, settings: tuple, *, replace: bool, create: bool) -> int:
    """Adds images, or the vectors of a file, to an index, which `create` makes if there is none.

    `replace` embeds or adds stored ids again. Returns 1 if images were left out, otherwise 0.
    Vectors are checked before any is added. After an error, an index that was created is deleted if
    it is empty; otherwise a repeated command continues.
    """
    model, dimension, similarity = settings
    is_new = False
    try:
        store = indexes.open(place, model=model, write=True)
    except FileNotFoundError:
        if not create:
            raise
        if None in settings:
            raise ValueError(
                f"{source} does not say which model made its vectors: "
                f"dmljax index create {place} --bundle=BUNDLE --import={source}"
            ) from None
        store = indexes.create(place, model=model, dimension=dimension, similarity=similarity)
        is_new = True
    with store:
        try:
            if isinstance(source, str):
                _ids(source, store.dimension, store.similarity)
            return _add(store, source, replace, None)
        except BaseException:
            with contextlib.suppress(OSError, ValueError):
                if is_new and not store.count():
                    store.discard()
            raise


def reindex(
    place: str, source: Images | str, settings: tuple, *, replace: bool, drop_missing: bool
) -> int:
    """Fills an index of another model, which then replaces the present one in one step.

    Unless `drop_missing`, all items of the present index must be in the new one.
    """
    with indexes.open(place) as previous:
        model, dimension, similarity = settings
        if previous.model == model:
            raise ValueError(
                f"{previous.place} holds vectors of this bundle already: dmljax index add"
            )
        ids = _ids(source, dimension, similarity)
        if not drop_missing:  # before anything is embedded
            _check_complete(previous, lambda names: [name in ids for name in names])
        # An interrupted command is continued with what it has embedded from the same images.
        folder = None if isinstance(source, str) else source.place
        with indexes.reindex(
            place, model=model, dimension=dimension, similarity=similarity
        ) as store:
            files = store.files()
            kept = {x for x in ids if x in files and files[x].folder == folder}
            for items in store.scan():
                store.delete([item.id for item in items if item.id not in kept])
            status = _add(store, source, replace, previous)
            if previous.count() and not store.count():
                raise ValueError(
                    f"nothing could be added: {store.place} keeps its "
                    f"{counted(previous.count(), 'item')} of the previous model; correct --images "
                    "or --import and repeat the command"
                )
            if not drop_missing:  # some images could not be read
                _check_complete(previous, store.contains)
            store.switch()
            total = counted(store.count(), "item")
            print(f"{store.place} now has {total}; it had {previous.count():,}")
    return status


def _check_complete(previous: Index, contains_fn: Callable[[list[str]], list[bool]]) -> None:
    """Refuses to replace an index by one in which some of its items are missing."""
    place = previous.place
    missing: list[str] = []
    for items in previous.scan():
        ids = [item.id for item in items]
        missing += itertools.compress(ids, (not is_in for is_in in contains_fn(ids)))
    if missing:
        raise ValueError(
            f"{counted(len(missing), 'item')} of {place} would be lost, such as {missing[0]!r}: "
            f"{place} stays as it was. Repeat the command with images or vectors of all items, or "
            "with --drop-missing"
        )


def _ids(source: Images | str, dimension: int, similarity: str) -> set[str]:
    """Returns the ids of the images, or of the vectors, which are checked for this index.

    Errors name the file and the row.
    """
    if not isinstance(source, str):
        chunks = map(source.read_fn, source.chunks())
        return {image.id for images in chunks for image in images}
    ids: set[str] = set()
    row = 0
    for names, vectors, metadata in parquet.read(source):
        try:
            inputs.check_ids(names, first=row)
            inputs.check_vectors(vectors, dimension, SIMILARITIES[similarity], first=row)
            inputs.check_metadata(metadata, len(names), first=row)
            if twice := ids.intersection(names):
                raise DuplicateId(f"the id {inputs.names(list(twice))} occurs twice")
        except InvalidInput as error:
            raise type(error)(f"{source}, rows counted from 0: {error}") from None
        row += len(names)
        ids.update(names)
    return ids


def _stored(store: Index, ids: list[str]) -> list[str]:
    return list(itertools.compress(ids, store.contains(ids)))


def _add(store: Index, source: Images | str, replace: bool, previous: Index | None) -> int:
    if not isinstance(source, str):
        return _add_images(store, source, replace, previous)
    totals: Counter[str] = Counter()
    for ids, vectors, metadata in parquet.read(source):
        stored = set() if replace else set(_stored(store, ids))
        if new := [i for i, name in enumerate(ids) if name not in stored]:
            names = [ids[i] for i in new]
            origins = {} if previous is None else previous.files(names)
            files, columns = [origins.get(name) for name in names], [metadata[i] for i in new]
            store.add(names, vectors[new], columns, replace=replace, files=files)
        totals += Counter(added=len(new), skipped=len(stored))
    _report(store, totals, "vector")
    return 0


def _report(store: Index, totals: Counter[str], noun: str) -> None:
    text = f"added {counted(totals['added'], noun)}"
    if totals["changed"]:
        text += f", embedded {counted(totals['changed'], f'changed {noun}')} again"
    if totals["skipped"]:
        text += f", {totals['skipped']:,} were there already"
    holder = f"the index that is to replace {store.place}" if store.superseded else store.place
    print(f"{text}; {holder} has {counted(store.count(), 'item')}")


def _add_images(store: Index, images: Images, replace: bool, previous: Index | None) -> int:
    """Embeds images and adds them, a chunk at a time."""
    left_out: list[str] = []
    ids_so_far: set[str] = set()
    totals: Counter[str] = Counter()
    start = reported = time.monotonic()
    for rows in images.chunks():
        chunk = {}
        for image in images.read_fn(rows):
            if problem := _problem(image, ids_so_far):
                left_out.append(problem)
            else:
                ids_so_far.add(image.id)
                chunk[image.id] = image
        stored, origins = set(_stored(store, [*chunk])), store.files([*chunk])
        # Before the files are read.
        files = {name: File(images.place, _stamp(x.path)) for name, x in chunk.items()}
        for name in [] if replace else sorted(stored):
            origin = origins.get(name, File("", None))
            if origin.folder and _is_other_file(origin, chunk[name]):
                path = chunk.pop(name).path
                left_out.append(f"{path}: an image of {origin.folder} has the same id, {name}")
            elif None in (origin.stamp, files[name].stamp) or origin.stamp == files[name].stamp:
                del chunk[name]
                totals["skipped"] += 1
        ids, vectors, problems = images.embed_fn([*chunk.values()])
        for name, problem in problems:
            path, kept = str(chunk[name].path), "; its old vector stays" * (name in stored)
            left_out.append((problem if path in problem else f"{path}: {problem}") + kept)
        if ids:
            metadata = {name: metadata_of(name, {}) for name in ids}
            for index in filter(None, (previous, store)):
                metadata |= {x.id: x.metadata for x in index.get(_stored(index, ids))}
            columns = [{**metadata[name], **chunk[name].metadata} for name in ids]
            store.add(ids, vectors, columns, replace=True, files=[files[name] for name in ids])
        for name in ids:
            totals["changed" if name in stored and not replace else "added"] += 1
        if time.monotonic() - reported > _REPORT_SECONDS:
            reported = time.monotonic()
            rate = f"{rows.stop / (reported - start):.0f} a second"
            print(f"{rows.stop:,} of {images.total:,} images, {rate}", file=sys.stderr)
    _report(store, totals, "image")
    for problem in left_out[:_MOST_PRINTED]:
        print(f"left out: {problem}", file=sys.stderr)
    if left_out:
        note = f" ({images.path_note})" if images.path_note else ""
        print(f"{counted(len(left_out), 'image')} left out{note}", file=sys.stderr)
    return 1 if left_out else 0


def _problem(image: Any, ids_so_far: set[str]) -> str | None:
    """Returns why an image cannot be added under its id; None if it can."""
    try:
        inputs.check_ids([image.id])
    except InvalidInput as error:
        return str(error)
    if image.id in ids_so_far:
        return f"{image.path}: another image has the same id, {image.id}"
    return None


def _stamp(path: str | bytes) -> str | None:
    """Returns size and modification time of a file; None if it cannot be read."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return f"{status.st_size} {status.st_mtime_ns}"


def _is_other_file(origin: File, image: Any) -> bool:
    """Returns whether an item comes from a file that still exists and is not the image's."""
    file = os.path.join(origin.folder, image.id)
    exist = os.path.exists(file) and os.path.exists(image.path)
    return exist and not os.path.samefile(file, image.path)


def metadata_of(name: str, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the metadata of an image: the folder in its id, and the columns of a list."""
    return {"folder": name.rpartition("/")[0], **columns}
