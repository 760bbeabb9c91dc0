"""What of a net learns, as pure functions of trees of parameters.

* `split(params, frozen)` and `joined`: what learns and what does not, as two trees.
* `blocks`, `layer_factors`: how deep a parameter lies, and the learning rate that follows from it.
* `lora(key, params)` and `merged(params, adapters)`: low-rank adapters; `with_magnitudes`: DoRA.
* `distilled(method, net)`: a method that stays close to its first backbone.
* `interpolated(params, others, share)`: WiSE-FT.
* `trained` has what a config names by `trained=`: a method made from a method.
"""

from dmljax.adapt.depth import blocks, layer_factors
from dmljax.adapt.distillation import distilled
from dmljax.adapt.lowrank import lora, merged, with_magnitudes
from dmljax.adapt.trees import interpolated, joined, split

__all__ = [
    "blocks",
    "distilled",
    "interpolated",
    "joined",
    "layer_factors",
    "lora",
    "merged",
    "split",
    "with_magnitudes",
]
