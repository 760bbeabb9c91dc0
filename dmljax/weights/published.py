"""The table of published files of weights. docs/weights.md describes them."""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
from typing import NamedTuple

__all__ = ["PUBLISHED", "Published", "file_name", "identify"]


class Published(NamedTuple):
    """A published file.

    `net` is the backbone in `dmljax.nets` that it fits. `digest` is 'sha256:' or 'sha1:' and the
    published digits, or ''. `normalization` is the preprocessing that it expects.
    """

    net: str
    url: str
    digest: str
    megabytes: int
    license: str
    normalization: str = "imagenet"


_TORCHVISION = "https://download.pytorch.org/models"
_DINO = "https://dl.fbaipublicfiles.com/dino"
_ONNX = "https://github.com/onnx/models/raw/4c46cd00fbdb7cd30b6c1c17ab54f2e1f4f7b177/validated"
_BSD = "torchvision, BSD-3-Clause; trained on ImageNet, whose terms may bind you"
_TIMM = "timm hub, BSD-3-Clause (torchvision's weights); trained on ImageNet"
_CAFFE = "BVLC, released for unrestricted use; trained on ImageNet"
_FACEBOOK = "DINO, Apache-2.0; trained on ImageNet"
_CADENE = "no license is stated for the weights; trained on ImageNet"


def _torchvision(net: str, file: str, megabytes: int) -> Published:
    digest = f"sha256:{file.removesuffix('.pth').rpartition('-')[2]}"
    return Published(net, f"{_TORCHVISION}/{file}", digest, megabytes, _BSD)


PUBLISHED = {
    "resnet18": _torchvision("resnet18", "resnet18-f37072fd.pth", 47),
    "resnet34": _torchvision("resnet34", "resnet34-333f7ec4.pth", 87),
    "resnet50": _torchvision("resnet50", "resnet50-19c8e357.pth", 103),
    "resnet50_v2": _torchvision("resnet50", "resnet50-11ad3fa6.pth", 103),
    "resnet101": _torchvision("resnet101", "resnet101-5d3b4d8f.pth", 179),
    "resnet152": _torchvision("resnet152", "resnet152-b121ed2d.pth", 242),
    "resnet50.tv_in1k": Published(
        "resnet50",
        "https://huggingface.co/timm/resnet50.tv_in1k/resolve/main/model.safetensors",
        "",
        102,
        _TIMM,
    ),
    "dino_resnet50": Published(
        "resnet50", f"{_DINO}/dino_resnet50_pretrain/dino_resnet50_pretrain.pth", "", 94, _FACEBOOK
    ),
    "mobilenet_v2": _torchvision("mobilenet_v2", "mobilenet_v2-b0353104.pth", 14),
    "googlenet": Published(
        "googlenet",
        "http://dl.caffe.berkeleyvision.org/bvlc_googlenet.caffemodel",
        "sha1:405fc5acd08a3bb12de8ee5e23a96bec22f08204",
        54,
        _CAFFE,
        "caffe",
    ),
    "googlenet_onnx": Published(
        "googlenet",
        f"{_ONNX}/vision/classification/inception_and_googlenet/googlenet/model/googlenet-7.onnx",
        "sha256:5725ccfd90845735ce5897faf7843c3f9b13acda3c4f3bff82cb21c9337c9de8",
        28,
        _CAFFE,
        "caffe",
    ),
    "googlenet_bn": _torchvision("googlenet_bn", "googlenet-1378be20.pth", 52),
    "bn_inception": Published(
        "bn_inception",
        "http://data.lip6.fr/cadene/pretrainedmodels/bn_inception-52deb4733.pth",
        "sha256:52deb4733",
        45,
        _CADENE,
        "caffe_bn",
    ),
    "dino_vits16": Published(
        "vit_s16",
        f"{_DINO}/dino_deitsmall16_pretrain/dino_deitsmall16_pretrain.pth",
        "",
        87,
        _FACEBOOK,
    ),
    "dino_vitb16": Published(
        "vit_b16",
        f"{_DINO}/dino_vitbase16_pretrain/dino_vitbase16_pretrain.pth",
        "",
        343,
        _FACEBOOK,
    ),
}


def file_name(name: str) -> str:
    """The name under which `fetch` keeps the file."""
    file = PUBLISHED[name].url.rpartition("/")[2]
    # All files of the timm hub have this name.
    return f"{name}.safetensors" if file == "model.safetensors" else file


def identify(path: str | os.PathLike) -> str | None:
    """The name in `PUBLISHED` of the file at `path`, or None.

    A file is recognized by its digest, or by its name where no digest is published.
    """

    @functools.cache
    def digest(algorithm: str) -> str:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, algorithm).hexdigest()

    for name, published in PUBLISHED.items():
        algorithm, _, digits = published.digest.partition(":")
        if algorithm and digest(algorithm).startswith(digits):
            return name
        if not algorithm and pathlib.Path(path).name == file_name(name):
            return name
    return None
