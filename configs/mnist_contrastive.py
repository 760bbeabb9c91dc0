"""MNIST in a plane by the contrastive loss, after a blog post, with a movie of the training.

    python -m dmljax.main --config=configs/mnist_contrastive.py --config.dataset.root=mnist
    python -m dmljax.main --config=configs/mnist_contrastive.py:labels=159 ...

`labels` are the digits to keep. The post shows all of them, 159 and 125689, and gives no numbers:
no result is promised. The form is the faithful one: `help(dmljax.recipes.mnist)`.
"""

from dmljax import recipes

get_config = recipes.config_function(recipes.mnist, loss="contrastive")
