"""TinyImageNet: triplets with mined pairs against ArcFace, after a published review.

    python -m dmljax.main --config=configs/tinyimagenet.py --config.dataset.root=tinyimagenet \\
        --config.net.weights=resnet50.safetensors
    python -m dmljax.main --config=configs/tinyimagenet.py:loss=arcface ...

The review (pento.ai, 2022) has plots without numbers, so only an order can be expected: triplets
lead in AMI and NMI, ArcFace in mAP, MAP@R, MRR, P@1 and RP. Its mAP and MRR are cut at the number
of positives (mAP@max_bin_count, MRR@max_bin_count here; with 50 images of every class that mAP is
MAP@R), its NMI is of one start of k-means. Neither form can be called faithful,
because the review leaves too much open (`help(dmljax.recipes.tinyimagenet)`). Not run at full size
here yet.
"""

from dmljax import recipes

get_config = recipes.config_function(recipes.tinyimagenet)
