"""Published weights: read them, check them against a net, convert them, know their input.

* `load(path, net)` returns the variables of a net from a published or a converted file.
* `convert(path, net, to, spec=...)` writes a file that carries its source and its license.
* `load_adapter` and `write_adapter`: LoRA in files of the package peft.
* `expected_normalization(path)` is the `normalize` of a config that a file expects, and
  `expected_preprocessing(path)` has size, crop and filter, too.
* `fetch(name, folder=...)` downloads one of `PUBLISHED`, and `explain(name)` describes it.

Nothing in a file is executed (`readers`). docs/weights.md has the list of files.
"""

from dmljax.weights.conversion import convert
from dmljax.weights.converted import (
    expected_normalization,
    expected_preprocessing,
    file_digest,
    read_metadata,
)
from dmljax.weights.download import fetch
from dmljax.weights.entries import License, Preprocessing, Published
from dmljax.weights.explanation import explain
from dmljax.weights.installed import get_command, installed
from dmljax.weights.layouts import classifier_size, torch_tensors
from dmljax.weights.loading import from_tensors, load, name_map_of
from dmljax.weights.peft import load_adapter, write_adapter
from dmljax.weights.published import PUBLISHED, file_name
from dmljax.weights.readers import Weights, read

__all__ = [
    "PUBLISHED",
    "License",
    "Preprocessing",
    "Published",
    "Weights",
    "classifier_size",
    "convert",
    "expected_normalization",
    "expected_preprocessing",
    "explain",
    "fetch",
    "file_digest",
    "file_name",
    "from_tensors",
    "get_command",
    "installed",
    "load",
    "load_adapter",
    "name_map_of",
    "read",
    "read_metadata",
    "torch_tensors",
    "write_adapter",
]
