"""Published weights give the numbers of PyTorch, if a package with such weights is installed."""

import functools
import importlib
import pathlib

import jax
import numpy as np
import pytest

from dmljax import nets, weights
from dmljax.config import registry
from dmljax.nets import normalizations


def _installed(name):
    if name not in weights.installed():
        pytest.skip(f"{weights.PUBLISHED[name].package} is not installed")
    return weights.installed()[name]


@functools.cache
def _embedder(output, name="mobilenet_v2"):
    net = getattr(nets, name)(classes=1000)
    variables = weights.load(_installed(name), net)
    return jax.jit(lambda x: net.apply(variables, x, train=False)[output])


@pytest.mark.slow
def test_real_mobilenet_classifies_as_in_torch(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(pathlib.Path(__file__).parents[1] / "nets")
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (4, 28, 28, 3)).astype(np.uint8)
    images = normalizations.imagenet(coarse.repeat(8, axis=1).repeat(8, axis=2))
    outputs = np.asarray(_embedder("logits")(images))
    net = importlib.import_module("reference_mobilenet").MobileNetV2(classes=1000).eval()
    net.load_state_dict(torch.load(_installed("mobilenet_v2"), weights_only=True))
    with torch.no_grad():
        x = torch.from_numpy(images.transpose(0, 3, 1, 2).copy())
        expected = net(x)["logits"].numpy()
    print(
        "largest logit", np.abs(expected).max(), "largest error", np.abs(outputs - expected).max()
    )
    assert np.abs(expected).max() > 5
    np.testing.assert_allclose(outputs, expected, atol=1e-4)


# Of efficientnet_lite_pytorch 0.1.0 with these weights: the first logits and the largest one.
LOGITS = {
    "efficientnet_lite0": ([[-1.1832, 0.5743, 0.2643], [-1.3579, 0.6004, 0.5120]], 701, 3.6187),
    "efficientnet_lite1": ([[-1.8910, 0.1451, 1.1930], [-1.8467, 0.2278, 1.4098]], 21, 5.9970),
    "efficientnet_lite2": ([[-1.2248, 0.4326, -0.4371], [-1.3814, 0.6361, -0.3081]], 21, 4.9592),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOGITS)
def test_real_efficientnets_give_the_logits_of_their_code(name):
    published = weights.PUBLISHED[name].preprocessing
    index = np.arange(published.size) * 20 // published.size
    coarse = np.random.default_rng(0).integers(0, 256, (2, 20, 20, 3)).astype(np.uint8)
    normalize_fn = registry.resolve("normalization", published.normalize)
    images = normalize_fn(coarse[:, index][:, :, index])
    logits, (first, best, largest) = np.asarray(_embedder("logits", name)(images)), LOGITS[name]
    np.testing.assert_allclose(logits[:, :3], first, atol=2e-4)
    assert logits.argmax(axis=1).tolist() == [best, best]
    assert logits.max() == pytest.approx(largest, abs=2e-4)
