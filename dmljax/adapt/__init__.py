"""What of a net learns, as pure functions of trees of parameters.

* `split(params, frozen)` and `joined`: what learns and what does not, as two trees.
* `blocks`, `layer_factors`, `is_spared_from_decay`: how deep a parameter lies, and the learning
  rate and weight decay that follow from it.
* `lora(key, params)` and `merged(params, adapters)`: low-rank adapters; `with_magnitudes`: DoRA.
* `distilled(method, net)`: a method that stays close to its first backbone.
* `interpolated(params, others, share)`: WiSE-FT.
* `trained` has what a config names by `trained=`: a method made from a method.
"""

from dmljax.adapt.depth import Blocks, blocks, is_spared_from_decay, layer_factors
from dmljax.adapt.distillation import distilled, similarity_distance
from dmljax.adapt.lowrank import lora, lora_scale, merged, with_magnitudes
from dmljax.adapt.trees import interpolated, joined, path_of, paths_of, paths_under, split

__all__ = [
    "Blocks",
    "blocks",
    "distilled",
    "interpolated",
    "is_spared_from_decay",
    "joined",
    "layer_factors",
    "lora",
    "lora_scale",
    "merged",
    "path_of",
    "paths_of",
    "paths_under",
    "similarity_distance",
    "split",
    "with_magnitudes",
]
