"""Residual nets: torchvision, timm, DINO."""

from dmljax.weights.entries import (
    APACHE,
    BICUBIC,
    BSD,
    IMAGENET,
    Preprocessing,
    Published,
    torchvision,
)

_TIMM = "https://huggingface.co/timm/resnet50.tv_in1k/resolve/main/model.safetensors"
_DINO = "https://dl.fbaipublicfiles.com/dino/dino_resnet50_pretrain/dino_resnet50_pretrain.pth"

PUBLISHED = {
    "resnet18": torchvision("resnet18", "resnet18-f37072fd.pth", 47),
    "resnet34": torchvision("resnet34", "resnet34-333f7ec4.pth", 87),
    "resnet50": torchvision("resnet50", "resnet50-19c8e357.pth", 103),
    "resnet50_v2": torchvision(
        "resnet50", "resnet50-11ad3fa6.pth", 103, Preprocessing(shorter=232)
    ),
    "resnet101": torchvision("resnet101", "resnet101-5d3b4d8f.pth", 179),
    "resnet152": torchvision("resnet152", "resnet152-b121ed2d.pth", 242),
    "resnet50.tv_in1k": Published("resnet50", _TIMM, 102, BSD, IMAGENET),
    "dino_resnet50": Published(
        "resnet50", _DINO, 94, APACHE, "ImageNet-1k, without labels", BICUBIC
    ),
}
