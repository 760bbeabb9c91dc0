"""Published weights: read them, check them against a net, convert them, know their input.

* `load(path, net)` returns the variables of a net from a published or a converted file.
* `convert(path, net, to, spec=...)` writes a file that carries its source and its license.
* `expected_normalization(path)` names the function of `preprocessing` that a file expects.
* `fetch(name, folder=...)` downloads one of `PUBLISHED`.

Nothing in a file is executed (`readers`). docs/weights.md has the list of files.
"""

from dmljax.weights.conversion import convert
from dmljax.weights.converted import expected_normalization, file_digest, read_metadata
from dmljax.weights.download import fetch
from dmljax.weights.layouts import classifier_size, torch_tensors
from dmljax.weights.loading import from_tensors, load
from dmljax.weights.published import PUBLISHED, Published, file_name
from dmljax.weights.readers import Weights, read

__all__ = [
    "PUBLISHED",
    "Published",
    "Weights",
    "classifier_size",
    "convert",
    "expected_normalization",
    "fetch",
    "file_digest",
    "file_name",
    "from_tensors",
    "load",
    "read",
    "read_metadata",
    "torch_tensors",
]
