"""Sequences of encoded images in ArrayRecord shards: prepared data sets and TFDS data sets."""

import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from dmljax.files import reading


class ArrayRecords:
    """Encoded images in ArrayRecord shards. Pickles as the list of its shards."""

    def __init__(self, shards: Sequence[str | os.PathLike]):
        from array_record.python import array_record_data_source

        self._shards = [os.fspath(shard) for shard in shards]
        # An empty split has no shards, which ArrayRecord does not accept.
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
        """What messages call record `i`."""
        return f"record {i} of {os.path.dirname(self._shards[0])}"

    def fingerprint(self) -> str:
        """The names and sizes of the shards, for `data.digest`."""
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
        """What messages call record `i`."""
        return f"record {i} of tfds {self._name}"

    def fingerprint(self) -> str:
        """The name and the size of the data set, for `data.digest`."""
        return f"tfds {self._name} {len(self)}"


def tfds_set(
    name: str,
    *,
    split: str,
    data_dir: str | None,
    columns: Sequence[str],
    encoded: Sequence[str] = (),
) -> tuple[TfdsRecords, dict[str, tuple], Any]:
    """`(records, {column: values}, features)` of a TFDS data set stored as ArrayRecord.

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
        first = [source[i] for i in range(min(1, len(source)))]
    except Exception as error:  # TFDS raises many types of errors for missing data
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise FileNotFoundError(
            f"tfds {name}: no ArrayRecord data in {folder} ({reason[0][:120]}). Create it once, "
            f"where TensorFlow is installed: tfds build {name} --file_format=array_record "
            f"--data_dir={folder}; or read the original files with root="
        ) from error
    if not first:
        raise FileNotFoundError(f"tfds {name}: the split {split} in {folder} is empty")
    items = (source[i] for i in range(len(source)))
    rows = [[item[column] for column in columns] for item in items]
    values = dict(zip(columns, zip(*rows, strict=True), strict=True))
    return TfdsRecords(source, name), values, builder.info.features


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
    """The names of classes in the JSON of a `features.json`, in its present and its old form."""
    for key, value in content.items() if isinstance(content, dict) else enumerate(content):
        if key in ("pythonClassName", "python_class_name", "type") and isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            yield from _class_names(value)
