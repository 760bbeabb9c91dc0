"""Miners: which pairs or triplets of a batch a loss uses.

Every miner is `(distances [b n], pairs, *, ...) -> ops.Pairs` and is passed to a loss as `mine_fn`.
Bind its hyper-parameters with `functools.partial`:

    losses.triplet(x, labels, mine_fn=partial(miners.semihard_triplets, margin=0.2))

* `distances` are Euclidean distances of unit embeddings, not squared, whatever the loss itself
  measures. With s the cosine, d = sqrt(2 - 2 s).
* `pairs` are the masks of positives and negatives. A miner only removes pairs.
* `angular`, `triplet_margin`, `hard_triplets`, `semihard_triplets` and `easy_triplets` select
  triplets and return `ops.Triplets`, which hold a rule instead of b n n masks.
* No gradient flows through the selection, and no shape depends on the data.
* Of equal candidates, the first is taken. A pair whose distance is NaN is kept, so that the loss
  becomes NaN: conditions are written as what must not hold, such as `~(d > margin)`.
* Miners that draw take a JAX `key`; the same key gives the same draw. For a new key in every step,
  use `jax.random.fold_in(key, step)`.
* `across_halves` and `next_in_batch` select by a row's position, so the order of the batch matters.
* `selections` are the functions that `batch_easy_hard` takes.
"""

from dmljax.miners import draws, pairs, triplets
from dmljax.miners import selections as selections
from dmljax.miners._common import check
from dmljax.miners.draws import *  # noqa: F403
from dmljax.miners.pairs import *  # noqa: F403
from dmljax.miners.triplets import *  # noqa: F403
from dmljax.ops.types import add_arguments

__all__ = sorted([*draws.__all__, *pairs.__all__, *triplets.__all__])
for _name in __all__:
    add_arguments(globals()[_name], check)
