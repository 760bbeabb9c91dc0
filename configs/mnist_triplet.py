"""MNIST in a plane by the triplet loss, after a blog post, with a movie of the training.

    python -m dmljax.main --config=configs/mnist_triplet.py --config.dataset.root=mnist
    python -m dmljax.main --config=configs/mnist_triplet.py:labels=159 ...

`labels` are the digits to keep. The post shows all of them, 159 and 125689, and gives no numbers:
no result is promised. Its author finds triplets no better than pairs. The form is the
faithful one: `help(dmljax.recipes.mnist)`.
"""

from dmljax import recipes

get_config = recipes.config_function(recipes.mnist, loss="triplet")
