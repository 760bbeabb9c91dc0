"""Images a second through our nets and through torch, forward and with gradients, in one run.

    pip install -e '.[bench]' && python benchmarks/nets.py [--nets convnet resnet50]

The same batch, the same machine, turn by turn; medians. `convnet` is five 3x3 convolutions with
batch norm on 128 images of 32x32x1; `resnet50` takes 16 images of 224x224x3. On an accelerator the
nets compute in bfloat16. The gradient is that of the squared features with respect to all
parameters, with batch norm training. `xla` is ours with XLA's own gradients of convolutions.
"""

import argparse
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import torch

from dmljax import main as dmljax_main
from dmljax import nets
from dmljax.kernels import convolution, initial

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests" / "nets"))

dmljax_main.tune_cpu()
GPU = jax.default_backend() == "gpu"
SHAPES = {"convnet": (128, 32, 32, 1), "resnet50": (16, 224, 224, 3)}


def torch_net(name: str) -> torch.nn.Module:
    if name == "convnet":
        from reference_small import ConvNet

        return ConvNet(channels=1)
    from reference_resnet import ResNet

    return ResNet((3, 4, 6, 3), bottleneck=True)


def ours(name: str, x: np.ndarray):
    """Compiled forward pass and gradient step, each of no arguments, and seconds of init."""
    net = getattr(nets, name)(dtype=jnp.bfloat16 if GPU else None)
    began = time.perf_counter()
    init = jax.jit(initial.together(lambda key: net.init(key, x[:2], train=True)))
    variables = jax.block_until_ready(init(jax.random.key(0)))
    seconds = time.perf_counter() - began
    x = jax.device_put(x)

    def forward(params, stats, x):
        variables = {"params": params, "batch_stats": stats}
        out, changed = net.apply(variables, x, train=True, mutable=["batch_stats"])
        return jnp.sum(out["features"].astype(jnp.float32) ** 2), changed

    arguments = variables["params"], variables["batch_stats"], x
    plain = jax.jit(forward).lower(*arguments).compile()
    step = jax.jit(jax.value_and_grad(forward, has_aux=True)).lower(*arguments).compile()
    return [lambda f=f: jax.block_until_ready(f(*arguments)) for f in (plain, step)], seconds


def theirs(name: str, x: np.ndarray):
    device = "cuda" if GPU else "cpu"
    net = torch_net(name).to(device).train()
    x = torch.tensor(x).permute(0, 3, 1, 2).contiguous().to(device)

    def loss():
        with torch.autocast(device, dtype=torch.bfloat16, enabled=GPU):
            return (net(x)["features"].float() ** 2).sum()

    def forward():
        with torch.no_grad():
            loss().item()

    def step():
        net.zero_grad()
        loss().backward()
        if GPU:
            torch.cuda.synchronize()

    return [forward, step]


def medians(functions, rounds: int) -> list[float]:
    """Seconds of each, which take turns.

    The first pass of a turn is not counted: the other library's threads spin on for a while.
    """
    took = []
    for _ in range(rounds + 1):  # the first is not counted
        took.append([])
        for function in functions:
            function()
            began = time.perf_counter()
            function()
            took[-1].append(time.perf_counter() - began)
    return np.median(took[1:], axis=0).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nets", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    print("| net | pass | dmljax, images/s | torch | dmljax / torch | xla | init, s |")
    print("|---|---|---|---|---|---|---|")
    for name in args.nets:
        x = np.random.default_rng(0).normal(size=SHAPES[name]).astype(np.float32)
        own, seconds = ours(name, x)
        kept = convolution.conv.__globals__["_conv"]
        convolution.conv.__globals__["_conv"] = convolution._plain
        plain, _ = ours(name, x)
        convolution.conv.__globals__["_conv"] = kept
        peer = theirs(name, x)
        for kind, *functions in zip(("forward", "and gradient"), own, peer, plain, strict=True):
            a, b, c = (len(x) / t for t in medians(functions, args.rounds))
            print(
                f"| {name} | {kind} | {a:.1f} | {b:.1f} | {a / b:.2f} | {c:.1f} | {seconds:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
