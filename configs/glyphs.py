"""Characters in sixteen type faces: a run that needs no download and takes minutes on a laptop.

    python -m dmljax.main --config=configs/glyphs.py

Half of the characters are for training, the other half is never seen. Measured on two cores shared
with other jobs: R@1 of the unseen characters from 0.134 (raw pixels) to 0.882, MAP@R 0.537 and NMI
0.877 after 900 steps; the whole command took 4 minutes 52 seconds.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    return ConfigDict(
        {
            "dataset": {"name": "glyphs"},
            "transform": "glyphs_train",
            "eval_transform": "unchanged",
            "normalize": "unit",
            "sampler": {"name": "plan", "classes": 32, "per_class": 4},
            "net": {"name": "convnet"},
            "method": {"name": "pairs", "dim": 64},
            "loss": {"name": "supcon"},
            "optimizer": {"name": "adam", "rate": 3e-3, "decay": 1e-4},
            "schedule": {"name": "cosine", "warmup": 20},
            "steps": 900,
            "evaluate": {"every": 300},
            "runtime": {"cache": True},
        }
    )
