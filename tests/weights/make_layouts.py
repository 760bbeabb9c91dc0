"""Writes `layouts/*.json`: names, shapes and outputs of nets of timm and other packages.

    pip install timm==1.0.31 transformers==5.23.0 efficientnet_lite_pytorch==0.1.0
    python make_layouts.py

The tests give our nets the same values under the same names, and compare the outputs.
"""

import json
import pathlib

import efficientnet_lite_pytorch
import seeded
import timm
import torch
import transformers
from efficientnet_lite_pytorch import utils
from timm.models import efficientnet

FOLDER = pathlib.Path(__file__).parent / "layouts"
CLASSES = 10


def write(name, code, net, keywords, shape, model, pooled_fn, logits_fn=None):
    """`net` and `keywords` name our net; `pooled_fn` and `logits_fn` compute its outputs."""
    tensors = {k: list(v.shape) for k, v in model.state_dict().items() if v.is_floating_point()}
    filled = {k: torch.from_numpy(seeded.values(k, tuple(s))) for k, s in tensors.items()}
    model.load_state_dict(filled, strict=False)
    x = torch.from_numpy(seeded.images(shape)).permute(0, 3, 1, 2)
    with torch.no_grad():
        model.eval()
        outputs = {"pooled": pooled_fn(x)[:, :8].double().numpy().round(6).tolist()}
        if logits_fn is not None:
            outputs["logits"] = logits_fn(x).double().numpy().round(6).tolist()
    about = {"code": code, "net": net, "keywords": keywords, "images": shape}
    text = json.dumps({**about, "outputs": outputs, "tensors": tensors}, indent=1)
    (FOLDER / f"{name}.json").write_text(f"{text}\n")


def efficientnets():
    code = f"timm {timm.__version__}"
    keywords = {"multiplier": 0.25, "depth": 1.1, "classes": CLASSES}
    options = {"channel_multiplier": 0.25, "depth_multiplier": 1.1, "num_classes": CLASSES}
    model = efficientnet._gen_efficientnet_lite(
        "tf_efficientnet_lite1", pad_type="same", bn_eps=1e-3, **options
    )

    def pooled(x):
        return model.forward_head(model.forward_features(x), pre_logits=True)

    shape = [2, 45, 66, 3]
    write("efficientnet_timm", code, "efficientnet_lite0", keywords, shape, model, pooled, model)
    for number, depth in ((0, 1.0), (1, 1.1)):
        keywords = {"multiplier": 0.25, "depth": depth, "classes": CLASSES}
        blocks, options = utils.get_model_params("efficientnet-lite0", None)
        options = options._replace(
            width_coefficient=0.25, depth_coefficient=depth, num_classes=CLASSES, image_size=None
        )
        other = efficientnet_lite_pytorch.EfficientNet(blocks, options)

        def pooled_of_package(x, other=other):
            return other.extract_features(x).mean((2, 3))

        name, code = f"efficientnet_package{number}", "efficientnet_lite_pytorch 0.1.0"
        args = "efficientnet_lite0", keywords, shape, other, pooled_of_package, other
        write(name, code, *args)


def convnexts():
    keywords = {"width": 8, "blocks": [1, 2, 1, 1], "classes": CLASSES}
    widths, depths, shape = [8, 16, 32, 64], [1, 2, 1, 1], [2, 64, 96, 3]
    model = timm.models.ConvNeXt(depths=depths, dims=widths, num_classes=CLASSES)

    def pooled(x):
        return model.forward_head(model.forward_features(x), pre_logits=True)

    code = f"timm {timm.__version__}"
    write("convnext_timm", code, "convnext_t", keywords, shape, model, pooled, model)
    code = f"transformers {transformers.__version__}"
    config = transformers.ConvNextConfig(
        hidden_sizes=widths, depths=depths, num_labels=CLASSES, layer_norm_eps=1e-6
    )
    whole = transformers.ConvNextForImageClassification(config)
    body = transformers.ConvNextModel(config)
    write(
        "convnext_transformers",
        code,
        "convnext_t",
        keywords,
        shape,
        whole,
        lambda x: whole.convnext(x).pooler_output,
        lambda x: whole(x).logits,
    )
    keywords = {**keywords, "classes": None}
    write(
        "convnext_transformers_body",
        code,
        "convnext_t",
        keywords,
        shape,
        body,
        lambda x: body(x).pooler_output,
    )


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    efficientnets()
    convnexts()
