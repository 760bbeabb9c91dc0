"""MNIST in a plane by the triplet loss, after a blog post, with a movie of the training.

    python -m dmljax.main --config=configs/mnist_triplet.py --config.dataset.root=mnist
    python -m dmljax.main --config=configs/mnist_triplet.py:labels=159 ...

The post shows three experiments with this loss, as pictures, and gives no numbers:

    argument         training images  test images
                     60,000           10,000
    labels=125689    35,839           6,000
    labels=159       18,112           3,036

Its author finds triplets no better than pairs, and worse on 159. `repeat_frames=3` slows
the movie down. The form is the faithful one: `help(dmljax.recipes.mnist)`.
"""

from dmljax import recipes

get_config = recipes.config_function(recipes.mnist, loss="triplet")
