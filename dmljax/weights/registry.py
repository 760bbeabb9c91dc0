"""Which weights are published, and how to get them. docs/weights.md tells more of each."""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import os
import pathlib
import urllib.error
import urllib.request
from typing import Any, NamedTuple

from absl import logging

__all__ = ["KNOWN", "Known", "fetch", "file_name", "table"]


class Known(NamedTuple):
    """A published file. `digest`: 'sha256:' or 'sha1:' and the digits of it that are published."""

    net: str
    url: str
    digest: str
    megabytes: int
    licence: str
    inputs: str = "imagenet"


_TORCHVISION = "https://download.pytorch.org/models"
_DINO = "https://dl.fbaipublicfiles.com/dino"
_ONNX = "https://github.com/onnx/models/raw/4c46cd00fbdb7cd30b6c1c17ab54f2e1f4f7b177/validated"
_BSD = "torchvision, BSD-3-Clause; trained on ImageNet, whose terms may bind you"
_TIMM = "timm hub, BSD-3-Clause (torchvision's weights); trained on ImageNet"
_CAFFE = "BVLC, released for unrestricted use; trained on ImageNet"
_FACEBOOK = "DINO, Apache-2.0; trained on ImageNet"
_CADENE = "no licence is stated for the weights; trained on ImageNet"


def _torchvision(net: str, file: str, megabytes: int) -> Known:
    digest = f"sha256:{file.removesuffix('.pth').rpartition('-')[2]}"
    return Known(net, f"{_TORCHVISION}/{file}", digest, megabytes, _BSD)


KNOWN = {
    "resnet18": _torchvision("resnet18", "resnet18-f37072fd.pth", 47),
    "resnet34": _torchvision("resnet34", "resnet34-333f7ec4.pth", 87),
    "resnet50": _torchvision("resnet50", "resnet50-19c8e357.pth", 103),
    "resnet50_v2": _torchvision("resnet50", "resnet50-11ad3fa6.pth", 103),
    "resnet101": _torchvision("resnet101", "resnet101-5d3b4d8f.pth", 179),
    "resnet152": _torchvision("resnet152", "resnet152-b121ed2d.pth", 242),
    "resnet50.tv_in1k": Known(
        "resnet50",
        "https://huggingface.co/timm/resnet50.tv_in1k/resolve/main/model.safetensors",
        "",
        102,
        _TIMM,
    ),
    "dino_resnet50": Known(
        "resnet50", f"{_DINO}/dino_resnet50_pretrain/dino_resnet50_pretrain.pth", "", 94, _FACEBOOK
    ),
    "mobilenet_v2": _torchvision("mobilenet_v2", "mobilenet_v2-b0353104.pth", 14),
    "googlenet": Known(
        "googlenet",
        "http://dl.caffe.berkeleyvision.org/bvlc_googlenet.caffemodel",
        "sha1:405fc5acd08a3bb12de8ee5e23a96bec22f08204",
        54,
        _CAFFE,
        "caffe",
    ),
    "googlenet_onnx": Known(
        "googlenet",
        f"{_ONNX}/vision/classification/inception_and_googlenet/googlenet/model/googlenet-7.onnx",
        "sha256:5725ccfd90845735ce5897faf7843c3f9b13acda3c4f3bff82cb21c9337c9de8",
        28,
        _CAFFE,
        "caffe",
    ),
    "googlenet_bn": _torchvision("googlenet_bn", "googlenet-1378be20.pth", 52),
    "bn_inception": Known(
        "bn_inception",
        "http://data.lip6.fr/cadene/pretrainedmodels/bn_inception-52deb4733.pth",
        "sha256:52deb4733",
        45,
        _CADENE,
        "caffe_bn",
    ),
    "dino_vits16": Known(
        "vit_s16",
        f"{_DINO}/dino_deitsmall16_pretrain/dino_deitsmall16_pretrain.pth",
        "",
        87,
        _FACEBOOK,
    ),
    "dino_vitb16": Known(
        "vit_b16",
        f"{_DINO}/dino_vitbase16_pretrain/dino_vitbase16_pretrain.pth",
        "",
        343,
        _FACEBOOK,
    ),
}


def fetch(
    name: str, *, folder: str | os.PathLike | None = None, timeout: float = 60.0
) -> pathlib.Path:
    """The path of a published file, downloaded unless it is there, and checked by its digest.

    `folder` is $DMLJAX_CACHE or ~/.cache/dmljax. A download that was cut short goes on where it
    stopped, if there is a digest to tell whether the two halves belong together.
    """
    if name not in KNOWN:
        raise ValueError(f"{name!r} is not known. There are: {', '.join(sorted(KNOWN))}")
    known = KNOWN[name]
    default = os.environ.get("DMLJAX_CACHE") or "~/.cache/dmljax"
    folder = pathlib.Path(folder or default).expanduser()
    path, part = folder / file_name(name), folder / f"{file_name(name)}.part"
    if path.exists():
        return _checked(path, known)
    folder.mkdir(parents=True, exist_ok=True)
    with open(part, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # other processes of a run fetch the same
        if path.exists():  # one of them was done before this one opened an empty part
            part.unlink(missing_ok=True)
            return _checked(path, known)
        if not known.digest:
            file.truncate(0)
        try:
            _download(known.url, file, timeout)
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or str(error) or type(error).__name__
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            raise ConnectionError(
                f"{name} could not be downloaded ({reason}). Run it again to go on, or get "
                f"{known.url} elsewhere and put it at {path}"
            ) from error
        try:
            _checked(part, known)
        except ValueError:
            file.truncate(0)  # not removed: another process may wait for its lock
            raise
        os.replace(part, path)
    return path


def _download(url: str, file: Any, timeout: float) -> None:
    """Appends to `file` what it lacks."""
    done = os.fstat(file.fileno()).st_size
    headers = {"User-Agent": "dmljax"} | ({"Range": f"bytes={done}-"} if done else {})
    try:
        response = urllib.request.urlopen(
            urllib.request.Request(url, headers=headers), timeout=timeout
        )
    except urllib.error.HTTPError as error:
        if error.code != 416:
            raise
        error.close()
        if error.headers.get("Content-Range", "") == f"bytes */{done}":
            return  # it was whole
        file.truncate(0)
        return _download(url, file, timeout)
    with response:
        length = response.headers.get("Content-Length")
        if done and response.status == 206:
            if not response.headers.get("Content-Range", "").startswith(f"bytes {done}-"):
                raise OSError("the server sent another part than it was asked for")
        else:
            file.truncate(0)
            done = 0
        while block := response.read(1 << 20):
            file.write(block)
            done += len(block)
            length = None if length is None else int(length) - len(block)
    file.flush()
    if length:
        raise OSError(f"the connection ended after {done} bytes, {length} are missing")


def _checked(path: pathlib.Path, known: Known) -> pathlib.Path:
    kind, _, digits = known.digest.partition(":")
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, kind or "sha256").hexdigest()
    if not digits:
        logging.warning("%s: no digest is published to check it by; SHA-256 %s", path, found)
    elif not found.startswith(digits):
        raise ValueError(
            f"{path} is damaged or another file: its {kind.upper()} is {found}, not {digits}"
            f"{'' if len(digits) >= 40 else '...'}: delete it and fetch it again"
        )
    return path


def file_name(name: str) -> str:
    """What `fetch` calls the file."""
    file = KNOWN[name].url.rpartition("/")[2]
    # The hub calls all of them the same.
    return f"{name}.safetensors" if file == "model.safetensors" else file


def table() -> str:
    """The known files, for people."""
    lines = []
    for name, known in KNOWN.items():
        kind, _, digits = known.digest.partition(":")
        digest = f"{kind} {digits}{'' if len(digits) >= 40 else '...'}" if kind else "no digest"
        lines += [f"{name}  --net={known.net}  {known.megabytes} MB  {digest}"]
        lines += [f"    {known.url}", f"    {known.licence}"]
    return "\n".join(lines)
