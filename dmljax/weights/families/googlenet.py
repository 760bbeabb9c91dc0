"""GoogLeNet in Caffe's and in torchvision's form, and BN-Inception."""

from dmljax.weights.entries import IMAGENET, License, Preprocessing, Published, torchvision

_ONNX = "https://github.com/onnx/models/raw/4c46cd00fbdb7cd30b6c1c17ab54f2e1f4f7b177/validated"
_CAFFE = License("BVLC, released for unrestricted use", "yes", "no conditions")
_CADENE = License("not stated", "not stated", "the authors state no license for the weights")

PUBLISHED = {
    "googlenet": Published(
        "googlenet",
        "http://dl.caffe.berkeleyvision.org/bvlc_googlenet.caffemodel",
        54,
        _CAFFE,
        IMAGENET,
        Preprocessing(normalize="caffe"),
        "sha1:405fc5acd08a3bb12de8ee5e23a96bec22f08204",
    ),
    "googlenet_onnx": Published(
        "googlenet",
        f"{_ONNX}/vision/classification/inception_and_googlenet/googlenet/model/googlenet-7.onnx",
        28,
        _CAFFE,
        IMAGENET,
        Preprocessing(normalize="caffe"),
        "sha256:5725ccfd90845735ce5897faf7843c3f9b13acda3c4f3bff82cb21c9337c9de8",
    ),
    "googlenet_bn": torchvision("googlenet_bn", "googlenet-1378be20.pth", 52),
    "bn_inception": Published(
        "bn_inception",
        "http://data.lip6.fr/cadene/pretrainedmodels/bn_inception-52deb4733.pth",
        45,
        _CADENE,
        IMAGENET,
        Preprocessing(normalize="caffe_bn"),
        "sha256:52deb4733",
    ),
}
