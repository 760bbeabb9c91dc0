"""How a train step grows: from the compiled computation's own cost analysis.

`python benchmarks/scale.py` prints the tables of docs/scale.md. Devices are simulated on the CPU;
operations, memory and bytes sent are counted per device in the program that was compiled for it.
`JAX_NUM_CPU_DEVICES=1 python benchmarks/scale.py` runs and times the steps of one device: simulated
devices share the cores, even those that stand by.
"""

import argparse
import functools
import math
import os
import re
import time

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "64")

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from dmljax import losses, methods
from dmljax.train import optimizers, schedules
from dmljax.train.devices import Shardings, class_rows, of_state
from dmljax.train.step import init_state, train_step

SIDE = 8  # of the images: what the loss costs is asked, not what a net costs
_SENT = re.compile(
    r"= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
_BYTES = {"f32": 4, "s32": 4, "u32": 4, "pred": 1, "u8": 1, "s8": 1, "f64": 8, "s64": 8, "bf16": 2}


class Net(nn.Module):
    """One matrix on the pixels: next to nothing, so that the rest stands out."""

    @nn.compact
    def __call__(self, x, *, train):
        x = nn.Dense(256)(x.reshape(len(x), -1))
        return {"features": x[:, None, None], "pooled": x}


def sent(text: str) -> dict[str, int]:
    """Bytes of the results of all collectives of a compiled program, by kind."""
    bytes_by_kind = {}
    for shapes, kind in _SENT.findall(text):
        for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", shapes):
            size = _BYTES[dtype] * math.prod(int(n) for n in dims.split(",") if n)
            bytes_by_kind[kind] = bytes_by_kind.get(kind, 0) + size
    return bytes_by_kind


def measure(method_fn, *, devices=1, batch=128, sharded=False):
    """(operations, MB of temporaries, MB of state and batch, MB sent by kind, s) of one device."""
    shards = Shardings(jax.devices()[:devices])
    method = method_fn()
    schedule = schedules.constant(total=1)
    optimizer = optimizers.build(optimizers.adam(), rate=1e-3, schedule=schedule)
    images = jax.ShapeDtypeStruct((2, SIDE, SIDE, 3), jnp.float32)
    first = {"images": images, "labels": jax.ShapeDtypeStruct((2,), jnp.int32)}

    def begin(batch):
        return init_state(*method.init(jax.random.key(0), batch), optimizer)

    shapes = jax.eval_shape(begin, first)
    sharded = "classes" if sharded else None
    split = class_rows(
        method,
        shapes.params,
        classes=len(shapes.params.get("proxies", ())),
        shards=shards,
        sharded=sharded,
    )
    places = of_state(shapes, shards, sharded=sharded, class_rows=split)

    def gather(tree):
        return jax.tree.map(lambda a: jax.lax.with_sharding_constraint(a, shards.everywhere), tree)

    step = train_step(
        method,
        optimizer,
        normalize_fn=lambda x: x.astype(jnp.float32) / 255,
        seed=0,
        gather_fn=gather if sharded else None,
    )
    like = functools.partial(jax.ShapeDtypeStruct, sharding=shards.rows)
    rows = {"images": like((batch, SIDE, SIDE, 3), jnp.uint8), "labels": like((batch,), jnp.int32)}
    state = jax.tree.map(
        lambda a, place: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), shapes, places
    )

    def on_mesh(state, rows):
        with jax.sharding.use_abstract_mesh(shards.mesh.abstract_mesh):
            return step(state, rows)

    step_fn = jax.jit(on_mesh, donate_argnums=0, out_shardings=(places, shards.everywhere))
    compiled = step_fn.lower(state, rows).compile()
    took = None
    if jax.device_count() == 1 and batch <= 2048:

        def some(a):
            if a.dtype == np.int32 and a.shape:  # labels, four of each
                return jax.device_put(np.arange(len(a), dtype=np.int32) // 4, a.sharding)
            rng = np.random.default_rng(0)
            if a.dtype == np.uint8:
                return jax.device_put(rng.integers(0, 256, a.shape, np.uint8), a.sharding)
            values = np.abs(rng.normal(size=a.shape)) * 0.05
            if a.shape[:1] == (3 * SIDE**2,):
                values = rng.normal(size=a.shape) * 0.05  # a net that tells images apart
            return jax.device_put(values.astype(a.dtype), a.sharding)

        state, rows, times = jax.tree.map(some, state), jax.tree.map(some, rows), []
        for _ in range(6):
            start = time.perf_counter()
            state, _ = jax.block_until_ready(compiled(state, rows))
            times.append(time.perf_counter() - start)
        took = min(times)
    cost, memory = compiled.cost_analysis(), compiled.memory_analysis()
    sent_mb = {k: v / 1e6 for k, v in sent(compiled.as_text()).items()}
    return (
        cost["flops"],
        memory.temp_size_in_bytes / 1e6,
        memory.argument_size_in_bytes / 1e6,
        sent_mb,
        took,
    )


def table(first: str, rows) -> None:
    columns = "Gflop", "temporaries, MB", "state and batch, MB", "gathered, MB", "reduced, MB", "ms"
    print(f"\n| {first} | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
    for name, (method, options) in rows:
        if options.get("devices", 1) > jax.device_count():
            continue
        flops, temporary, held, sent_mb, took = measure(method, **options)
        gathered = sent_mb.pop("all-gather", 0)
        print(
            f"| {name} | {flops / 1e9:.2f} | {temporary:.1f} | {held:.1f} | {gathered:.2f} "
            f"| {sum(sent_mb.values()):.2f} | {'' if took is None else f'{1e3 * took:.1f}'} |",
            flush=True,
        )


def pairs(d=128):
    loss = losses.multi_similarity
    return functools.partial(methods.pairs, Net(), loss, classes=8, dim=d)


def proxies(c=1000, d=128, **options):
    loss = losses.normalized_softmax
    return functools.partial(methods.proxies, Net(), loss, classes=c, dim=d, **options)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    table("pairs: batch", ((f"{b:,}", (pairs(), {"batch": b})) for b in (128, 512, 2048, 8192)))
    table("pairs: d", ((f"{d:,}", (pairs(d), {"batch": 2048})) for d in (64, 128, 512, 2048)))
    table(
        "pairs of 2,048: devices",
        ((n, (pairs(), {"batch": 2048, "devices": n})) for n in (1, 2, 8, 64)),
    )
    table("proxies: classes", ((f"{c:,}", (proxies(c), {})) for c in (1024, 16384, 262144)))
    for sharded in (False, True):
        kind = "each a share" if sharded else "each all"
        many = ((n, (proxies(262144), {"devices": n, "sharded": sharded})) for n in (1, 2, 8, 64))
        table(f"262,144 proxies, {kind}: devices", many)
    for title, options in (("tiles of 4,096", {}), ("a tenth in tiles of 4,096", {"sample": 0.1})):
        method = proxies(262144, tile=4096, **options)
        many = ((n, (method, {"devices": n, "sharded": True})) for n in (1, 2, 8, 64))
        table(f"262,144 proxies, {title}: devices", many)


if __name__ == "__main__":
    main()
