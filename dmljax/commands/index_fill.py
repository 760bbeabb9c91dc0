"""`dmljax index create`, `add` and `reindex`: images or vectors become items of an index.

What is stored already is skipped, and images that cannot be added are named.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from absl import logging

from dmljax import index as indexes
from dmljax.files import cores
from dmljax.hints import counted
from dmljax.index import DuplicateId, Index, InvalidInput, inputs, sources

if TYPE_CHECKING:
    from dmljax.index import parquet

_CHUNK = 1024  # images that are added together
_REPORT_SECONDS = 10
_MOST_PRINTED = 10  # images that were left out


def fill(arguments: argparse.Namespace, place: str) -> int:
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
    first = first_stage(arguments.first)
    if not arguments.bundle and (arguments.images or arguments.verb == "reindex"):
        raise ValueError("--bundle=BUNDLE is needed: it embeds the images")
    bundle = images = previous = None
    is_new = False
    if arguments.bundle:
        from dmljax import bundle as bundles
        from dmljax.train import compilation

        compilation.keep_programs_or_warn()
        bundle = bundles.load(arguments.bundle)
    if arguments.split:
        _write_split(bundle, arguments)
    if arguments.images:
        from dmljax.bundle import collection

        images = collection.open_collection(arguments.images, metadata=True)
        if images.skipped_columns:
            print(
                f"{arguments.images}: not text, numbers or bools, so no metadata: "
                f"{', '.join(images.skipped_columns)}",
                file=sys.stderr,
            )
    settings = _settings(bundle, arguments.source)
    if first is not None and settings["dimension"] is not None:
        inputs.check_first(first, settings["dimension"], settings["similarity"])
    with contextlib.ExitStack() as stack:
        if arguments.verb == "reindex":
            previous = stack.enter_context(indexes.open(place))
            if previous.model == settings["model"]:
                raise ValueError(
                    f"{previous.place} holds vectors of this bundle already: dmljax index add"
                )
            ids = _ids(images, arguments.source)
            if not arguments.drop_missing:  # before anything is embedded
                _check_complete(previous, lambda names: [name in ids for name in names])
            # An interrupted command is continued if it embedded the same images.
            notes = sources.Sources(place, previous.generation + 1)
            continues = images is not None and notes.is_of(arguments.images)
            store = indexes.reindex(place, **settings, continues=continues)
            first = first or _inherited(previous, settings)
        else:
            store, is_new = _open(arguments, place, settings)
        stack.enter_context(store)
        notes = sources.Sources(place, store.generation)
        if previous is not None:
            _drop_others(store, ids)
        keeps_items = images is not None or os.path.isdir(arguments.source)  # the next one goes on
        with _discarded_after_an_error(store if is_new else None, keeps_items) as added:
            if first is not None:
                inputs.check_first(first, store.dimension, store.similarity)
            if bundle is None or images is None:
                # What is added before an error.
                stays = previous is None and not is_new and not keeps_items
                status = _add_vectors(store, arguments.source, arguments.replace, stays, added)
            else:
                if not store.count():
                    notes.note_all(arguments.images)
                status = _add_images(store, bundle, images, arguments, previous, notes)
        if previous is not None and images is None:
            sources.Sources(place, previous.generation).copy_to(notes)
        # An index that is replaced hands on the recall that was asked for.
        facts = None if previous is None else previous.facts()["approximate"]
        store.build(first=first, recall=(facts or {}).get("wanted"))
        if previous is not None:
            if previous.count() and not store.count():
                raise ValueError(
                    f"nothing could be added: {store.place} keeps its "
                    f"{counted(previous.count(), 'item')} of the previous model; correct --images "
                    "or --import and repeat the command"
                )
            if not arguments.drop_missing:  # some images could not be read
                _check_complete(previous, store.contains)
            store.switch()
            total = counted(store.count(), "item")
            print(f"{store.place} now has {total}; it had {previous.count():,}")
    return status


def first_stage(text: str | None) -> int | str | None:
    """The value of --first: the number of a prefix, or a word."""
    return int(text) if text is not None and text.isdecimal() else text


def _inherited(previous: Index, settings: dict[str, Any]) -> int | str | None:
    """What the present index compares first, if the one after it can do so, too."""
    first = previous.first_stage
    try:
        if first is not None:
            inputs.check_first(first, settings["dimension"], settings["similarity"])
    except InvalidInput:
        return None
    return first


@contextlib.contextmanager
def _discarded_after_an_error(new: Index | None, keeps_items: bool) -> Iterator[Counter[str]]:
    """Deletes a new index after an error in the block; if it `keeps_items`, only an empty one.

    The block counts in "items" what it has added: an index on a server stays if it has items that
    somebody else has added meanwhile.
    """
    added: Counter[str] = Counter()
    try:
        yield added
    except BaseException:
        try:
            if new is not None and new.count() == (0 if keeps_items else added["items"]):
                new.discard()
        except (OSError, ValueError) as error:
            logging.warning("%s could not be deleted, and is incomplete: %s", new.place, error)
        raise


def _open(
    arguments: argparse.Namespace, place: str, settings: dict[str, Any]
) -> tuple[Index, bool]:
    """The index to add to, and whether `create` made it because it did not exist."""
    try:
        return indexes.open(place, model=settings["model"], write=True), False
    except FileNotFoundError:
        if arguments.verb == "add":
            raise
    if None in settings.values():
        raise ValueError(
            f"{arguments.source} does not say which model made its vectors: "
            f"dmljax index create {place} --bundle=BUNDLE --import={arguments.source}"
        )
    return indexes.create(place, **settings), True


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
    from dmljax.config.digests import PATHS
    from dmljax.data import image_files

    spec = files.read_json(bundle.folder, bundle.manifest, files.CONFIG)["dataset"]
    # A bundle keeps the last part of a path, which may be something else in this folder.
    name = next((name for name in PATHS["dataset"] if spec.get(name)), None)
    if name is not None and not arguments.root:
        raise ValueError(
            f"--split={arguments.split} needs --root=PATH: the bundle was trained on "
            f"{spec['name']!r} in {spec[name]!r}, and keeps no more of its path"
        )
    if arguments.root:
        spec[name or "root"] = arguments.root
    try:
        splits = dataset_flags.load(spec)
    except (ValueError, OSError) as error:
        hint = "" if arguments.root else " (--root=PATH says where the data set is)"
        raise ValueError(f"{error}{hint}") from None
    split = getattr(splits, arguments.split)
    about = {"dataset": spec, "split": arguments.split}
    try:
        count = image_files.write(split, arguments.images, about=about)
    except OSError as error:
        reason = error.strerror or error
        raise OSError(f"--images={arguments.images} cannot be written: {reason}") from None
    print(f"wrote {counted(count, 'image')} to {arguments.images}")


def _check_complete(previous: Index, contains_fn: Callable[[list[str]], list[bool]]) -> None:
    """Refuses to replace an index by one in which some of its items are missing."""
    place = previous.place
    missing: list[str] = []
    for items in previous.scan():
        ids = [item.id for item in items]
        missing += [x for x, is_in in zip(ids, contains_fn(ids), strict=True) if not is_in]
    if missing:
        raise ValueError(
            f"{counted(len(missing), 'item')} of {place} would be lost, such as {missing[0]!r}: "
            f"{place} stays as it was. Repeat the command with images or vectors of all items, or "
            "with --drop-missing"
        )


def _ids(images: Any, source: str | None) -> set[str]:
    """The ids of the images, or of the vectors, that are to be added."""
    if source is not None:
        from dmljax.index import parquet

        return {name for names in parquet.ids(source) for name in names}
    starts = range(0, images.count, _CHUNK)
    chunks = (range(start, min(start + _CHUNK, images.count)) for start in starts)
    return {image.id for rows in chunks for image in images.read_fn(rows)}


def _drop_others(store: Index, ids: set[str]) -> None:
    """Removes the items of an interrupted command that this one does not add."""
    for items in store.scan():
        store.delete([item.id for item in items if item.id not in ids])


def _add_vectors(store: Index, source: str, replace: bool, stays: bool, added: Counter[str]) -> int:
    """Adds the rows of a file or of parts. After an error, what was added `stays` or is deleted."""
    from dmljax.index import parquet

    skipped = row = 0
    are_parts = os.path.isdir(source)
    ids_so_far: set[str] = set()
    try:
        for batch in parquet.read(source):
            ids, vectors, metadata = batch
            if not are_parts:
                if twice := ids_so_far.intersection(ids):
                    raise DuplicateId(f"{source}: the id {inputs.names(list(twice))} occurs twice")
                ids_so_far.update(ids)
            with _errors_with_rows(batch, store, source, row):
                inputs.check_ids(ids)  # a row may have none
                if are_parts and not replace:  # an interrupted command is simply run again
                    stored = _stored(store, ids)
                    skipped += len(stored)
                    new = [i for i, name in enumerate(ids) if name not in stored]
                    ids, vectors = [ids[i] for i in new], vectors[new]
                    metadata = [metadata[i] for i in new]
                if ids:
                    store.add(ids, vectors, metadata, replace=replace)
            row += len(batch.ids)
            added["items"] += len(ids)
    except InvalidInput as error:
        if not (stays and added["items"]):
            raise
        rows = counted(added["items"], "row")
        more = f"{rows} before it were added: the next command needs --replace"
        raise type(error)(f"{error}; {more}") from None
    _report(store, added["items"], "vector", skipped)
    return 0


@contextlib.contextmanager
def _errors_with_rows(
    batch: parquet.Batch, store: Index, source: str, first: int
) -> Iterator[None]:
    """Errors about the rows of the block name the file and the row, counted from `first`.

    The rows are checked a second time only after an error.
    """
    try:
        yield
    except InvalidInput as error:
        ids, vectors, metadata = batch
        dimension, similarity = store.dimension, store.similarity
        try:
            inputs.check_ids(ids, first=first)
            inputs.check_vectors(vectors, dimension, similarity=similarity, first=first)
            inputs.check_metadata(metadata, len(ids), first=first)
        except InvalidInput as refusal:
            raise type(refusal)(f"{source}, rows counted from 0: {refusal}") from None
        if not isinstance(error, DuplicateId):
            raise
        raise DuplicateId(
            f"{source}: {store.place} has an item with the id "
            f"{inputs.names(list(_stored(store, ids)))} already: leave these rows out, or repeat "
            "the command with --replace"
        ) from None


def _report(store: Index, count: int, noun: str, skipped: int, changed: int = 0) -> None:
    more = f", embedded {counted(changed, f'changed {noun}')} again" if changed else ""
    more += f", {skipped:,} were there already" if skipped else ""
    total = counted(store.count(), "item")
    holder = f"the index that is to replace {store.place}" if store.superseded else store.place
    print(f"added {counted(count, noun)}{more}; {holder} has {total}")


def _add_images(
    store: Index,
    bundle: Any,
    images: Any,
    arguments: argparse.Namespace,
    previous: Index | None,
    notes: sources.Sources,
) -> int:
    """Embeds the images of a collection and adds them, some at a time."""
    from dmljax.bundle import collection

    left_out: list[str] = []
    ids_so_far: set[str] = set()
    added = skipped = again = stale = 0
    start = reported = time.monotonic()
    with ThreadPoolExecutor(cores.count()) as pool:
        for row in range(0, images.count, _CHUNK):
            rows = range(row, min(row + _CHUNK, images.count))
            chunk = [x for x in images.read_fn(rows) if _is_new(x, ids_so_far, left_out)]
            stored = _stored(store, [image.id for image in chunk])
            stamps = {image.id: sources.stamp(image.path) for image in chunk}  # before it is read
            if not arguments.replace:
                others = [x for x in chunk if x.id in stored and notes.has_other_file(x.id, x.path)]
                left_out += [
                    f"{x.path}: an image of {notes.folder_of(x.id)} has the same id, {x.id}"
                    for x in others
                ]
                for image in others:
                    del stamps[image.id]
                changed = {x: stamp for x, stamp in stamps.items() if notes.has_changed(x, stamp)}
                chunk = [x for x in chunk if x.id in changed or x.id not in stored]
                skipped += len(stamps) - len(chunk)
            ids, vectors, problems = collection.embedded(bundle, chunk, 0, pool)
            left_out += [x if name in x else f"{name}: {x}" for name, x in problems]
            if ids:
                notes.note(arguments.images, ids)
                columns = {image.id: image.metadata for image in chunk}
                metadata = _metadata(ids, columns, store, previous)
                store.add(ids, vectors, metadata, replace=True)
            for name, _ in problems:
                del stamps[name]
                stale += name in stored
            notes.note_stamps(stamps)
            again += 0 if arguments.replace else sum(name in stored for name in ids)
            added += len(ids)
            if time.monotonic() - reported > _REPORT_SECONDS:
                reported = time.monotonic()
                rate = f"{rows.stop / (reported - start):.0f} a second"
                print(f"{rows.stop:,} of {images.count:,} images, {rate}", file=sys.stderr)
    _report(store, added - again, "image", skipped, again)
    for problem in left_out[:_MOST_PRINTED]:
        print(f"left out: {problem}", file=sys.stderr)
    if left_out:
        note = f" ({images.path_note})" if images.path_note else ""
        print(f"{counted(len(left_out), 'image')} left out{note}", file=sys.stderr)
    if stale:
        print(
            f"the index keeps the old vectors of {stale:,} of them, until `dmljax index remove`",
            file=sys.stderr,
        )
    return 1 if left_out else 0


def _stored(store: Index, ids: list[str]) -> dict[str, None]:
    """The ids that are in an index, in the same order."""
    return {name: None for name, is_in in zip(ids, store.contains(ids), strict=True) if is_in}


def _is_new(image: Any, ids_so_far: set[str], left_out: list[str]) -> bool:
    """Whether an image can be added under its id; if not, `left_out` gets the reason."""
    try:
        inputs.check_ids([image.id])
        inputs.check_metadata([dict(image.metadata)], 1)
    except InvalidInput as error:
        left_out.append(str(error).replace("metadata of number 0", f"{image.path}: its metadata"))
        return False
    if image.id in ids_so_far:
        left_out.append(f"{image.path}: another image has the same id, {image.id}")
        return False
    ids_so_far.add(image.id)
    return True


def _metadata(
    ids: list[str],
    columns: Mapping[str, Mapping[str, Any]],
    store: Index,
    previous: Index | None,
) -> list[dict[str, Any]]:
    """The metadata of images: the folder, or what the index or the previous one says.

    `columns` are the further columns of a list of images, by id. They override the stored metadata.
    """
    from dmljax.bundle import collection

    metadata = {name: collection.metadata_of(name) for name in ids}
    for index in (previous, store):
        if index is not None:
            items = index.get(list(_stored(index, ids)))
            metadata |= {item.id: item.metadata for item in items}
    return [{**metadata[name], **columns[name]} for name in ids]
