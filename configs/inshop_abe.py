"""In-shop Clothes by an attention-based ensemble (ABE, Kim et al., ECCV 2018).

    python -m dmljax.main --config=configs/inshop_abe.py --config.dataset.root=inshop \\
        --config.net.weights=googlenet.safetensors
    python -m dmljax.main --config=configs/inshop_abe.py:learners=4,heads=True ...

Expected, in percent, from tables of later papers; queries search the gallery:

    row          argument                           R@1   R@10  R@20  R@30  R@40  R@50
    ABE-8                                           87.3  96.7  97.9  98.2  98.5  98.7

No published numbers are known for `learners=4`, `learners=2`, `heads=True` and `divergence=0`.

The default is the corrected form. `help(dmljax.recipes.abe)` says what the paper gives, what is a
guess, and how the paper chose its numbers. Not run at full size here yet.
"""

from dmljax import recipes

get_config = recipes.config_function(recipes.abe, dataset="inshop")
