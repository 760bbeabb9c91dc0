"""Cars196 by an attention-based ensemble (ABE, Kim et al., ECCV 2018).

    python -m dmljax.main --config=configs/cars_abe.py --config.dataset.root=cars196 \\
        --config.net.weights=googlenet.safetensors
    python -m dmljax.main --config=configs/cars_abe.py:learners=4,heads=True ...

Expected, in percent (the paper's tables 1 to 5); the last column is the mean R@1 of its learners:

    row          argument                           R@1   R@2   R@4   R@8     R@1 of a learner
    ABE-8                                           85.2  90.5  93.9  96.1    75.0
    ABE-4        learners=4                         82.5  89.1  93.0  95.5    74.4
    ABE-2        learners=2                         76.8  84.9  90.2  94.0    70.9
    ABE-1        learners=1                         67.3  77.3  85.3  90.9
    8-heads      heads=True                         76.1  84.3  90.3  93.9    68.3
    4-heads      heads=True,learners=4              76.6  84.2  89.3  93.2    70.4
    2-heads      heads=True,learners=2              73.3  82.5  88.6  93.0    70.2
    1-head       heads=True,learners=1              67.2  77.4  85.3  90.7
    8-heads+div  heads=True,divergence=1            76.0  84.6  89.7  93.5
    ABE-8-div    divergence=0                       69.7  78.8  86.2  91.5    69.5
    ABE-4(256)   learners=4,dim=256                 81.8  88.5  92.4  95.1    72.3
    ABE-2(128)   learners=2,dim=128                 75.5  84.0  89.4  93.6    68.6
    ABE-1(64)    learners=1,dim=64                  65.9  76.5  83.7  89.3
    ABE-8(384)   dim=384                            83.8  89.7  93.2  95.5
    ABE-4(384)   learners=4,dim=384                 82.2  88.6  92.6  95.6
    ABE-2(384)   learners=2,dim=384                 77.2  85.1  90.5  94.2
    ABE-8        crop=True                          93.0  95.9  97.5  98.5
    ABE-4        crop=True,learners=4               91.6  95.1  96.8  97.8
    ABE-2        crop=True,learners=2               88.2  92.8  95.6  97.3

R@1 of ABE-8 in figure 7, read off the plots within 0.1 (where 5 blocks at pool3 are 84.5 once and
85.2 elsewhere):

    blocks=1  blocks=2  blocks=3  blocks=4  blocks=5  blocks=6  blocks=7
    84.2      84.5      84.5      84.2      85.2      84.3      84.1
    branch=pool2  branch=3a  branch=pool3  branch=4a  branch=4b
    78.0          79.2       84.5          83.6       81.8
    divergence=0.1  divergence=0.5  1     divergence=5  divergence=10  divergence=50  divergence=100
    84.05           84.9            85.2  85.05         84.97          85.05          84.95

Without the divergence the learners collapse: the cosines between the learners of one image approach
1. `ranking=distance` adds the scores of the ranking that the paper's text defines.

The default is the corrected form. `help(dmljax.recipes.abe)` says what the paper gives, what is a
guess, and how the paper chose its numbers. Not run at full size here yet.
"""

from dmljax import recipes

get_config = recipes.config_function(recipes.abe, dataset="cars196")
