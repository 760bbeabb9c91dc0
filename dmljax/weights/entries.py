"""What is known about a published file: where it is, what it expects, what may be done with it."""

from typing import Any, NamedTuple

from dmljax.weights.preprocessing import inputs, title


class License(NamedTuple):
    """A license in plain words.

    `sell` says whether a product with the weights may be sold: 'yes', 'under these terms', 'no' or
    'not stated'. `terms` are the conditions.
    """

    name: str
    sell: str
    terms: str

    def __str__(self) -> str:
        return f"{self.name}; may be sold: {self.sell}; {self.terms}"


class Preprocessing(NamedTuple):
    """From a photograph to the input of a net.

    The shorter side becomes `shorter` and the central square of `size` pixels is cut; without
    `shorter`, both sides are squashed to `size`. `filter` is 'bilinear' or 'bicubic'. `normalize`
    is the value of the config's `normalize`: the name of a function of `weights.preprocessing`, or
    `{"name": "rgb", "mean": [...], "std": [...]}`.
    """

    size: int = 224
    shorter: int | None = 256
    filter: str = "bilinear"
    normalize: str | dict[str, Any] = "imagenet"

    def __str__(self) -> str:
        size = f"{self.size} x {self.size} pixels"
        if self.shorter is None:
            cut = f"both sides to {size} ({self.filter}, the aspect ratio is lost)"
        else:
            cut = f"shorter side to {self.shorter} ({self.filter}), central square of {size}"
        return f"{cut}; {title(self.normalize)}"

    @property
    def inputs(self) -> dict[str, Any]:
        """Order and range of the channels, mean and deviation."""
        return inputs(self.normalize) or {}

    @property
    def transform(self) -> dict[str, Any]:
        """The value of the config's `eval_transform`."""
        options = {"size": self.size, "filter": self.filter, "scaled_decode": True}
        if self.shorter is None:
            return {"name": "squash_eval", **options}
        return {"name": "standard_eval", "shorter": self.shorter, **options}


class Published(NamedTuple):
    """A published file.

    `net` is the backbone in `dmljax.nets` that it fits. `url` is one address or several with the
    same weights: the first that answers is taken; or only the file's name, if no address is
    published. `digest` is 'sha256:' or 'sha1:' and the published digits, or ''. `package` is the
    Python package that contains the file. `access` says what an address asks for.
    """

    net: str
    url: str | tuple[str, ...]
    megabytes: int
    license: License
    trained_on: str
    preprocessing: Preprocessing = Preprocessing()
    digest: str = ""
    package: str = ""
    access: str = ""

    @property
    def urls(self) -> tuple[str, ...]:
        return (self.url,) if isinstance(self.url, str) else self.url


IMAGENET = "ImageNet-1k, with labels; ImageNet's terms of use speak of research and may bind you"
APACHE = License("Apache-2.0", "yes", "keep the license text and the notices")
MIT = License("MIT", "yes", "keep the license text")
BSD = License("BSD-3-Clause", "yes", "keep the license text")
BILINEAR = Preprocessing()
BICUBIC = Preprocessing(filter="bicubic")


def torchvision(
    net: str, file: str, megabytes: int, preprocessing: Preprocessing = BILINEAR
) -> Published:
    """Describes a file of torchvision, whose name ends in the first digits of its SHA-256."""
    digest = f"sha256:{file.removesuffix('.pth').rpartition('-')[2]}"
    url = f"https://download.pytorch.org/models/{file}"
    return Published(net, url, megabytes, BSD, IMAGENET, preprocessing, digest)


def hub(repository: str) -> str:
    """Returns the address of a file of the Hugging Face hub."""
    return f"https://huggingface.co/{repository}/resolve/main/model.safetensors"
