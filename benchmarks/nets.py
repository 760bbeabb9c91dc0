"""Images a second through our nets and through torch, forward and with gradients, in one run.

    pip install -e '.[bench]' && python benchmarks/nets.py [--nets convnet resnet50]

Medians over rounds in which all take turns, with the same batch. `convnet` is five 3x3 convolutions
with batch norm on 128 images of 32x32x1; `resnet50` takes 16 images of 224x224x3. On an accelerator
the nets compute in bfloat16. The gradient is that of the squared features with respect to all
parameters, with batch norm in training mode. `xla` is ours with `impl="xla"`.
"""

import argparse
import functools
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import torch

from dmljax import main as dmljax_main
from dmljax import nets
from dmljax.nets.initializers import initial_values

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


def our_functions(name: str, x: np.ndarray, impl: str):
    """Compiled forward pass and gradient step, each without arguments, and seconds of init."""
    net = getattr(nets, name)(dtype=jnp.bfloat16 if GPU else None, impl=impl)
    start = time.perf_counter()
    init_fn = functools.partial(net.init, train=True)
    variables = jax.block_until_ready(initial_values(init_fn, jax.random.key(0), x[:2]))
    seconds = time.perf_counter() - start
    x = jax.device_put(x)

    def forward(params, stats, x):
        variables = {"params": params, "batch_stats": stats}
        out, changed = net.apply(variables, x, train=True, mutable=["batch_stats"])
        return jnp.sum(out["features"].astype(jnp.float32) ** 2), changed

    arguments = variables["params"], variables["batch_stats"], x
    forward_fn = jax.jit(forward).lower(*arguments).compile()
    step_fn = jax.jit(jax.value_and_grad(forward, has_aux=True)).lower(*arguments).compile()
    functions = [lambda f=f: jax.block_until_ready(f(*arguments)) for f in (forward_fn, step_fn)]
    return functions, seconds


def torch_functions(name: str, x: np.ndarray):
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
    """Median seconds of each function. They take turns, and the first round is not counted.

    Each turn starts with a call that is not counted, because the other library's threads go on
    spinning for a while.
    """
    seconds = []
    for _ in range(rounds + 1):
        seconds.append([])
        for function in functions:
            function()
            start = time.perf_counter()
            function()
            seconds[-1].append(time.perf_counter() - start)
    return np.median(seconds[1:], axis=0).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nets", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    print("| net | pass | dmljax, images/s | torch | dmljax / torch | xla | init, s |")
    print("|---|---|---|---|---|---|---|")
    for name in args.nets:
        x = np.random.default_rng(0).normal(size=SHAPES[name]).astype(np.float32)
        auto, seconds = our_functions(name, x, "auto")
        xla, _ = our_functions(name, x, "xla")
        peer = torch_functions(name, x)
        for kind, *functions in zip(("forward", "and gradient"), auto, peer, xla, strict=True):
            a, b, c = (len(x) / t for t in medians(functions, args.rounds))
            print(
                f"| {name} | {kind} | {a:.1f} | {b:.1f} | {a / b:.2f} | {c:.1f} | {seconds:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
