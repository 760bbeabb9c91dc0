"""Images a second through our nets and through torch, forward and with gradients, in one run.

    pip install -e '.[bench]' && python benchmarks/nets.py [--nets convnet resnet50]

Medians over rounds in which all take turns, with the same batch. `convnet` is five 3x3 convolutions
with batch norm on 128 images of 32x32x1; the others take 16 or 32 images of 224x224x3. In torch,
EfficientNet-lite and DINOv2 are timm's. On an accelerator the nets compute in bfloat16. The
gradient is that of a weighted sum of the features with respect to all parameters. Batch norm is in
training mode; with `--fixed-norms` it uses the running statistics, as fine-tuning does with
`norm=layers.frozen_batch_norm`. `--xla` adds ours with `impl="xla"`, which takes minutes for
depthwise convolutions.
`--images` replaces the number of images.

On a machine that others use, `--processor` measures processor time summed over all cores instead of
the clock. Torch then computes in one thread, because its threads spin while they wait.

Where torch has an environment of its own, its interpreter runs this with the folder of jax's
packages in PYTHONPATH.
"""

import argparse
import functools
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import timm
import torch

from dmljax import main as dmljax_main
from dmljax import nets
from dmljax.nets import layers
from dmljax.nets.initializers import initial_values

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests" / "nets"))

dmljax_main.tune_cpu()
GPU = jax.default_backend() == "gpu"
SHAPES = {
    "convnet": (128, 32, 32, 1),
    "resnet50": (16, 224, 224, 3),
    "mobilenet_v2": (32, 224, 224, 3),
    "efficientnet_lite0": (32, 224, 224, 3),
    "dinov2_s14": (16, 224, 224, 3),
}


class OfTimm(torch.nn.Module):
    """A net of timm with the output of the nets of tests/nets."""

    def __init__(self, name: str, **options):
        super().__init__()
        self.net = timm.create_model(name, num_classes=0, **options)

    def forward(self, x):
        x = self.net.forward_features(x)
        return {"features": x if x.ndim == 4 else x[:, 1:].movedim(-1, 1)}


def torch_net(name: str) -> torch.nn.Module:
    if name == "convnet":
        from reference_small import ConvNet

        return ConvNet(channels=1)
    if name == "mobilenet_v2":
        from reference_mobilenet import MobileNetV2

        return MobileNetV2()
    if name == "efficientnet_lite0":
        return OfTimm("tf_efficientnet_lite0")
    if name == "dinov2_s14":
        return OfTimm("vit_small_patch14_dinov2", img_size=224, init_values=1.0)
    from reference_resnet import ResNet

    return ResNet((3, 4, 6, 3), bottleneck=True)


def our_functions(name: str, x: np.ndarray, impl: str, frozen: bool):
    """Compiled forward pass and gradient step, each without arguments, and seconds of init."""
    net = getattr(nets, name)(
        dtype=jnp.bfloat16 if GPU else None,
        impl=impl,
        norm=layers.frozen_batch_norm if frozen else layers.batch_norm,
    )
    start = time.perf_counter()
    init_fn = functools.partial(net.init, train=True)
    variables = jax.block_until_ready(initial_values(init_fn, jax.random.key(0), x[:2]))
    seconds = time.perf_counter() - start
    x = jax.device_put(x)

    def forward(params, stats, x):
        variables = {"params": params, **stats}
        out, changed = net.apply(variables, x, train=True, mutable=["batch_stats"])
        features = out["features"].astype(jnp.float32)
        return jnp.sum(features * jnp.arange(features.shape[-1])), changed

    # With the first values of LayerScale, 1e-5, gradients are denormal numbers.
    params = jax.tree.map_with_path(
        lambda path, p: jnp.ones_like(p) if path[-1].key == "gamma" else p, variables.pop("params")
    )
    arguments = params, variables, x
    forward_fn = jax.jit(forward).lower(*arguments).compile()
    step_fn = jax.jit(jax.value_and_grad(forward, has_aux=True)).lower(*arguments).compile()
    functions = [lambda f=f: jax.block_until_ready(f(*arguments)) for f in (forward_fn, step_fn)]
    return functions, seconds


def torch_functions(name: str, x: np.ndarray, frozen: bool):
    device = "cuda" if GPU else "cpu"
    net = torch_net(name).to(device).train()
    for module in net.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.train(not frozen)
    x = torch.tensor(x).permute(0, 3, 1, 2).contiguous().to(device)

    def loss():
        with torch.autocast(device, dtype=torch.bfloat16, enabled=GPU):
            features = net(x)["features"].float()
            return (features.movedim(1, -1) * torch.arange(features.shape[1], device=device)).sum()

    def forward():
        with torch.no_grad():
            loss().item()

    def step():
        net.zero_grad()
        loss().backward()
        if GPU:
            torch.cuda.synchronize()

    return [forward, step]


def medians(functions, rounds: int, now=time.perf_counter) -> list[float]:
    """Median seconds of each function. They take turns, and the first round is not counted.

    Each turn starts with a call that is not counted, because the other library's threads go on
    spinning for a while.
    """
    seconds = []
    for _ in range(rounds + 1):
        seconds.append([])
        for function in functions:
            function()
            start = now()
            function()
            seconds[-1].append(now() - start)
    return np.median(seconds[1:], axis=0).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nets", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--fixed-norms", action="store_true")
    parser.add_argument("--xla", action="store_true")
    parser.add_argument("--images", type=int)
    parser.add_argument("--processor", action="store_true")
    args = parser.parse_args()
    now = time.process_time if args.processor else time.perf_counter
    if args.processor:
        torch.set_num_threads(1)
    columns = ["net", "pass", "dmljax, images/s", "torch", "dmljax / torch", "init, s"]
    columns += ["xla"] * args.xla
    print("|" + "|".join(f" {column} " for column in columns) + "|")
    print("|" + "---|" * len(columns))
    for name in args.nets:
        shape = (args.images or SHAPES[name][0], *SHAPES[name][1:])
        x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
        ours, seconds = our_functions(name, x, "auto", args.fixed_norms)
        sets = [ours, torch_functions(name, x, args.fixed_norms)]
        sets += [our_functions(name, x, "xla", args.fixed_norms)[0]] * args.xla
        for kind, *functions in zip(("forward", "and gradient"), *sets, strict=True):
            a, b, *plain = (len(x) / t for t in medians(functions, args.rounds, now))
            row = [name, kind, f"{a:.1f}", f"{b:.1f}", f"{a / b:.2f}", f"{seconds:.1f}"]
            row += [f"{c:.1f}" for c in plain]
            print("|" + "|".join(f" {cell} " for cell in row) + "|", flush=True)


if __name__ == "__main__":
    main()
