"""Stanford Online Products by an attention-based ensemble (ABE, Kim et al., ECCV 2018).

    python -m dmljax.main --config=configs/sop_abe.py --config.dataset.root=sop \\
        --config.net.weights=googlenet.safetensors
    python -m dmljax.main --config=configs/sop_abe.py:learners=4,heads=True ...

Expected, in percent, from tables of later papers:

    row          argument                           R@1   R@10  R@100  R@1000
    ABE-8                                           76.3  88.4  94.8   98.2

No published numbers are known for `learners=4`, `learners=2`, `heads=True` and `divergence=0`.

The default is the corrected form. `help(dmljax.recipes.abe)` says what the paper gives, what is a
guess, and how the paper chose its numbers. Not run at full size here yet.
"""

from dmljax import recipes

get_config = recipes.config_function(recipes.abe, dataset="sop")
