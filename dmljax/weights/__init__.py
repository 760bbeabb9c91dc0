"""Published weights: read them, check them against a net, convert them, know their input.

* `load(path, net)` returns the variables of a net from a published or a converted file.
* `convert(path, net, to, spec=...)` writes a file that carries its source and its license.
* `load_adapter` and `write_adapter`: LoRA in files of the package peft.
* `expected_normalization(path)` is the `normalize` of a config that a file expects, and
  `expected_preprocessing(path)` has size, crop and filter, too.
* `fetch(name, folder=...)` downloads one of `PUBLISHED`.

Nothing in a file is executed (`readers`). docs/weights.md has the list of files.
"""

from dmljax.weights.conversion import convert
from dmljax.weights.converted import (
    expected_normalization,
    expected_preprocessing,
    read_metadata,
)
from dmljax.weights.loading import load
from dmljax.weights.peft import load_adapter, write_adapter
from dmljax.weights.published import PUBLISHED, fetch, installed

__all__ = [
    "PUBLISHED",
    "convert",
    "expected_normalization",
    "expected_preprocessing",
    "fetch",
    "installed",
    "load",
    "load_adapter",
    "read_metadata",
    "write_adapter",
]
