"""Reads the images of a split by index, from files, ArrayRecord shards or TFDS data sets."""

import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dmljax.data import decode
from dmljax.data.splits import Split, record_name
from dmljax.files import reading


class Reader:
    """`reader(i)` returns image `i` of a split as `uint8 [h w c]`, cut to its box.

    With `cache`, each image is decoded once per process. `cache` may be a dict to be filled, which
    readers of one split with one `least_side` can share.

    `least_side` is as in `decode.decode`. Images that are cut to boxes are decoded in full.
    """

    def __init__(
        self,
        split: Split,
        cache: bool | dict[int, np.ndarray] = False,
        *,
        least_side: int | None = None,
    ):
        self.split = split
        self._least_side = None if split.boxes is not None else least_side
        self._cache: dict[int, np.ndarray] | None = None
        if cache is not False:
            self._cache = cache if isinstance(cache, dict) else {}

    def __call__(self, i: int, record: bytes | None = None) -> np.ndarray:
        """Reads image `i`; `record` is its content if the caller has read it already."""
        if self._cache is not None and (image := self._cache.get(i)) is not None:
            return image
        try:
            record = self.split.records[i] if record is None else record
            image = decode.read(record, least_side=self._least_side)
            if self.split.boxes is not None:
                left, top, right, bottom = self.split.boxes[i].tolist()
                if right > image.shape[1] or bottom > image.shape[0]:
                    raise decode.UnreadableImage(
                        f"the box {left} {top} {right} {bottom} exceeds the "
                        f"{image.shape[1]}x{image.shape[0]} image"
                    )
                image = image[top:bottom, left:right]
        except decode.UnreadableImage as error:
            name = record_name(self.split.records, i)
            raise decode.UnreadableImage(
                f"{name} cannot be read: {error}. Replace it, or set unreadable='skip' "
                "(--config.unreadable=skip)"
            ) from error
        if self._cache is not None:
            self._cache[i] = image
        return image

    def stack(self, indices: np.ndarray) -> np.ndarray | None:
        """Returns the images at `indices` if the split is one array in memory, otherwise None."""
        records = self.split.records
        if isinstance(records, np.ndarray) and records.ndim == 4 and self.split.boxes is None:
            return records[indices]
        return None

    def __getstate__(self):
        # A worker process starts with an empty cache.
        return self.split, None if self._cache is None else {}, self._least_side

    def __setstate__(self, state):
        self.split, self._cache, self._least_side = state


class ArrayRecords:
    """Encoded images in ArrayRecord shards. Pickles as the list of its shards."""

    def __init__(self, shards: Sequence[str | os.PathLike]):
        from array_record.python import array_record_data_source

        self._shards = [os.fspath(shard) for shard in shards]
        # ArrayRecord does not accept an empty split.
        self._source = (
            array_record_data_source.ArrayRecordDataSource(self._shards) if self._shards else ()
        )

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, i: int) -> bytes:
        return self._source[range(len(self._source))[i]]

    def __getstate__(self):
        return self._shards

    def __setstate__(self, shards):
        self.__init__(shards)

    def describe(self, i: int) -> str:
        """Returns the name of record `i` in messages."""
        return f"record {i} of {os.path.dirname(self._shards[0])}"

    def fingerprint(self) -> str:
        """Returns the names and sizes of the shards, for `data.digest`."""
        sizes = {os.path.basename(shard): os.path.getsize(shard) for shard in self._shards}
        return f"ArrayRecord {sorted(sizes.items())}"


class TfdsRecords:
    """The encoded images of a TFDS data source. `decode` decodes them, not TFDS."""

    def __init__(self, source: Any, name: str):
        self._source, self._name = source, name

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, i: int) -> bytes:
        return self._source[range(len(self._source))[i]]["image"]

    def describe(self, i: int) -> str:
        """Returns the name of record `i` in messages."""
        return f"record {i} of tfds {self._name}"

    def fingerprint(self) -> str:
        """Returns the name and the size of the data set, for `data.digest`."""
        return f"tfds {self._name} {len(self)}"


def tfds_set(
    name: str, split: str, data_dir: str | None, *columns: str, encoded: Sequence[str] = ()
) -> tuple[TfdsRecords, Any, list[tuple]]:
    """Reads `(records, features, columns)` of a TFDS data set in ArrayRecord files.

    Reading the columns does not decode images: neither "image" nor the features in `encoded`.
    """
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise FileNotFoundError(
            f"tfds {name}: source='tfds' needs TFDS: pip install 'dmljax[tfds]'"
        ) from error
    folder = data_dir or tfds.core.constants.DATA_DIR
    _check_features(pathlib.Path(folder).expanduser() / name)
    try:
        builder = tfds.builder(name, data_dir=data_dir, file_format="array_record")
        decoders = {key: tfds.decode.SkipDecoding() for key in ("image", *encoded)}
        source = builder.as_data_source(split=split, decoders=decoders)
        _ = source[0]
    except Exception as error:  # TFDS raises many types of errors for missing data
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise FileNotFoundError(
            f"tfds {name}: no ArrayRecord data in {folder} ({reason[0][:120]}). Create it once, "
            f"where TensorFlow is installed: tfds build {name} --file_format=array_record "
            f"--data_dir={folder}; or read the original files with root="
        ) from error
    items = (source[i] for i in range(len(source)))
    values = list(zip(*([item[column] for column in columns] for item in items), strict=True))
    return TfdsRecords(source, name), builder.info.features, values


def _check_features(folder: pathlib.Path) -> None:
    """Raises if a `features.json` names a class outside of TFDS: TFDS would import its module."""
    for path in (*folder.glob("*/features.json"), *folder.glob("*/*/features.json")):
        for name in _class_names(reading.json_file(path)):
            if "." in name and not name.startswith("tensorflow_datasets."):
                raise ValueError(
                    f"{path} names the class {name!r}. TFDS would import it, which runs its code: "
                    "prepare the data set by `tfds build`, or read the original files with root="
                )


def _class_names(content: Any) -> Iterator[str]:
    """Yields the names of classes in the JSON of a `features.json` of any version of TFDS."""
    for key, value in content.items() if isinstance(content, dict) else enumerate(content):
        if key in ("pythonClassName", "python_class_name", "type") and isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            yield from _class_names(value)
