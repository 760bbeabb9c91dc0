"""Names in files of others' nets, and what their code computes: tests/nets/fixtures/make.py.

The values in the files are drawn again here, so that the tests need no torch.
"""

import json
import pathlib
import sys

import numpy as np
import safetensors.numpy
from backbone_cases import jit

from dmljax import nets, weights

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
sys.path.insert(0, str(FIXTURES))
from drawn import content, direction, draw, images, narrow_statistics, sample, summary  # noqa: E402, F401

with np.load(FIXTURES / "published.npz") as _file:
    STORED = dict(_file)
CASES = json.loads(STORED.pop("cases").tobytes())["cases"]


def tensors(name, purpose="value"):
    """The content of the file: all of its tensors, also those that we leave out."""
    return content(CASES[name]["tensors"], purpose, CASES[name]["faint"])


def net(name, **keywords):
    keywords = CASES[name]["keywords"] | keywords
    tuples = {k: tuple(v) for k, v in keywords.items() if isinstance(v, list)}
    return getattr(nets, CASES[name]["net"])(**keywords | tuples)


COMPILED = {}  # functions by their nets, as files of other namings have the same one


def apply(name, variables, x, **keywords):
    """Outputs as float32."""
    model = net(name, **keywords)
    compiled = COMPILED.setdefault(repr(model), jit(lambda v, x: model.apply(v, x, train=False)))
    outputs = compiled(variables, x)
    return {key: np.asarray(value, np.float32) for key, value in outputs.items()}


def load(folder, name, purpose="value", **keywords):
    path = folder / f"{purpose}.safetensors"
    safetensors.numpy.save_file(tensors(name, purpose), path)
    notes = []
    variables = weights.load(path, net(name, **keywords), report_fn=notes.append)
    assert notes == []
    return variables


def keys(name):
    """The names of the stored arrays, by size."""
    return {tuple(size): f"{name}/{size[0]}x{size[1]}" for size in CASES[name]["sizes"]}


def stored(key):
    """The stored outputs of a case at a size, by name."""
    found = {n.removeprefix(f"{key}/"): v for n, v in STORED.items() if n.startswith(f"{key}/")}
    return {n: v for n, v in found.items() if n not in ("derivatives", "gradient", "statistics")}
