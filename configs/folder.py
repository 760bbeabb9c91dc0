"""Your own images: a folder for each class.

    python -m dmljax.main --config=configs/folder.py --config.dataset.root=photos/

Add `--config.net.weights=resnet50.safetensors` to start from published weights (docs/weights.md).
With few images this is necessary. `--config.net.frozen=True` keeps the statistics of their batch
norms.

Half of the classes (in the order of their names) are for training; the scores are of the others. A
fifth of the training classes is held out to choose the step whose scores are reported. No result is
promised: it depends on the images.

    loss=normalized_softmax or another loss, with the batch and the rates that it needs
"""

from dmljax import recipes

get_config = recipes.config_function(recipes.folder)
