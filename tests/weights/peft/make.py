"""Writes the adapters in this folder, with what transformers computes from them.

    python tests/weights/peft/make.py

needs torch 2.13, transformers 5.23 and peft 0.21. The tensors of the bases are drawn by their names
(`seeded.py`), so that only their names and shapes are stored.
"""

import json
import pathlib
import shutil
import sys
import tempfile

import numpy as np
import peft
import torch
import transformers
from safetensors.numpy import load_file, save_file

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from seeded import images, values  # noqa: E402

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4}
SIZES |= {"image_size": 12}
CASES = {
    "dinov2": (
        transformers.Dinov2Model,
        transformers.Dinov2Config(**SIZES),
        {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "fc1"]},
    ),
    "dinov2_dora": (
        transformers.Dinov2Model,
        transformers.Dinov2Config(**SIZES),
        {"r": 2, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "fc1"], "use_dora": True},
    ),
    "vit": (
        transformers.ViTForImageClassification,
        transformers.ViTConfig(intermediate_size=64, **SIZES),
        {"r": 3, "lora_alpha": 2, "use_rslora": True, "alpha_pattern": {"o_proj": 5}}
        | {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "fc2"]},
    ),
}


def made(name):
    """Writes the adapter of a case; the shapes of the base and the output of both."""
    kind, config, options = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        kind(config).save_pretrained(folder)
        file = pathlib.Path(folder) / "model.safetensors"
        shapes = {n: list(x.shape) for n, x in load_file(file).items()}
        save_file({n: values(n, s) for n, s in shapes.items()}, file, {"format": "pt"})
        model = peft.get_peft_model(kind.from_pretrained(folder), peft.LoraConfig(**options))
    for parameter_name, parameter in model.named_parameters():
        if "lora_" in parameter_name:
            drawn = values(parameter_name.removesuffix(".weight"), tuple(parameter.shape))
            parameter.data = torch.from_numpy(drawn)
    model.peft_config["default"].base_model_name_or_path = f"tests/{name}"
    model.save_pretrained(HERE / name)
    (HERE / name / "README.md").unlink()
    base = model.get_base_model()
    backbone = getattr(base, "vit", base)
    with torch.no_grad():
        x = torch.from_numpy(images((2, 12, 12, 3))).permute(0, 3, 1, 2)
        output = backbone(x).last_hidden_state[:, 0].numpy()
    return shapes, output


if __name__ == "__main__":
    for name in CASES:
        shutil.rmtree(HERE / name, ignore_errors=True)
        shapes, output = made(name)
        arrays = {"output": output.astype(np.float32)}
        save_file(arrays, HERE / name / "expected.safetensors", {"shapes": json.dumps(shapes)})
        print(name, sum(f.stat().st_size for f in (HERE / name).iterdir()), np.abs(output).max())
