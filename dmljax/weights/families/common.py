"""Sources, licenses and preprocessing that several families share."""

from dmljax.weights.entries import License, Preprocessing, Published

IMAGENET = "ImageNet-1k, with labels; ImageNet's terms of use speak of research and may bind you"
APACHE = License("Apache-2.0", "yes", "keep the license text and the notices")
MIT = License("MIT", "yes", "keep the license text")
BSD = License("BSD-3-Clause", "yes", "keep the license text")
BILINEAR = Preprocessing()
BICUBIC = Preprocessing(filter="bicubic")

_TORCHVISION = "https://download.pytorch.org/models"


def torchvision(
    net: str, file: str, megabytes: int, preprocessing: Preprocessing = BILINEAR
) -> Published:
    """Describes a file of torchvision, whose name ends in the first digits of its SHA-256."""
    digest = f"sha256:{file.removesuffix('.pth').rpartition('-')[2]}"
    url = f"{_TORCHVISION}/{file}"
    return Published(net, url, digest, megabytes, BSD, IMAGENET, preprocessing)


def hub(repository: str) -> str:
    """Returns the address of a file of the Hugging Face hub."""
    return f"https://huggingface.co/{repository}/resolve/main/model.safetensors"
