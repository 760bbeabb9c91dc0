"""Everything that has to be measured on an accelerator, in one table.

    python benchmarks/accelerator.py                # one GPU; no row begins after 8 minutes
    python benchmarks/accelerator.py --reduced      # tiny sizes, on a CPU: does every row work?

Each row is one function and runs in a process of its own, so that an error of a row (which is then
in its line) or a lack of memory does not touch the others. There are three stages. The first
compiles the programs of all rows and times nothing; `--jobs` processes share the GPU and one folder
of compiled programs. It takes at most half of the time, and a row that fails there is no error.
Before it, attention is measured, because its times decide which programs these are. The second
stage times one row after the other, alone on the GPU, and reads these programs. In the third, the
tests and the deterministic runs, which have no times, run together.

Results are in `--out`, the table beside it. The same command again repeats what failed or had no
time left. `--rows step evaluation` runs the rows whose names begin so. Peers are measured where
they are installed: torch with CUDA, and pytorch-metric-learning, whose losses have peers of
`large_batches.py` where it has none, and for losses in tiles.

`compile` is measured in the first stage, while `--jobs` processes compile at once. XLA also chooses
its kernels there, while these processes share the GPU. `share` is the model FLOPs utilisation:
operations of the products and convolutions of the program, divided by the time and by the rate that
the data sheet gives for bfloat16 (of evaluation: by the measured rate of a large float32 product).
`GiB` is the peak of the process on the device, of losses the temporaries of the program.
"""

import argparse
import contextlib
import functools
import hashlib
import importlib.util
import inspect
import itertools
import json
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, NamedTuple

import numpy as np

ROOT = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "nets"), str(ROOT / "benchmarks")]
from large_batches import LOSSES as IN_TORCH  # noqa: E402
from large_batches import VIEWS, torch_loss  # noqa: E402

TORCH_ROWS = 4096  # rows that torch compares with all columns at once, beside a loss in tiles
# Products of bfloat16 a second, by the data sheets (dense).
PEAKS = {"H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "H200": 989e12}
PEAKS |= {"B200": 2250e12, "A100": 312e12, "L40S": 362e12, "L40": 181e12}
FULL = {
    "batch": 256,
    "side": 224,
    "steps": 20,
    "depth": None,
    "eval": (60_502, 11_316, 512),
    "large": (1_000_000, 100_000, 128),
    "iterations": 20,
    "loss": 4_096,
    "tiled": 65_536,
    "classes": 1_000_000,
    "tile": 65_536,
    "product": 8_192,
    "photos": 256,
    "run": 60,
}
REDUCED = {
    "batch": 4,
    "side": 32,
    "steps": 2,
    "depth": 1,
    "eval": (600, 100, 16),
    "large": (1_000, 200, 8),
    "iterations": 3,
    "loss": 64,
    "tiled": 256,
    "classes": 512,
    "tile": 64,
    "product": 256,
    "photos": 8,
    "run": 3,
}
NETS = {"resnet50": 32, "dinov2_s14": 14, "dinov2_b14": 14, "siglip_b16_224": 16}  # patch
LOSSES = (
    "contrastive",
    "multi_similarity",
    "supcon",
    "ntxent",
    "circle",
    "nca",
    "margin",
    "triplet",
    "lifted_structure",
    "angular",
    "tuplet_margin",
    "fast_ap",
    "smooth_ap",
    "recall_at_k",
    "pnp",
    "clip",
    "siglip",
    "proxy_anchor",
    "proxy_nca",
    "normalized_softmax",
    "arcface",
    "cosface",
    "subcenter_arcface",
    "soft_triple",
)
AUGMENTED = {"name": "standard_train", "color": 0.4, "antialias": False}
TILED = (*LOSSES[:5], "clip", "siglip", "recall_at_k", "smooth_ap")
COMPILE_ONLY = False  # in processes of the first stage
FORMS = {"float32": None, "filter in bfloat16": "bfloat16"}
PEERS = {  # of pytorch-metric-learning, as far as a batch of 4,096 fits into memory
    "contrastive": "ContrastiveLoss",
    "multi_similarity": "MultiSimilarityLoss",
    "supcon": "SupConLoss",
    "circle": "CircleLoss",
    "nca": "NCALoss",
    "angular": "AngularLoss",
    "tuplet_margin": "TupletMarginLoss",
    "fast_ap": "FastAPLoss",
    "pnp": "PNPLoss",
    "proxy_anchor": "ProxyAnchorLoss",
    "proxy_nca": "ProxyNCALoss",
    "normalized_softmax": "NormalizedSoftmaxLoss",
    "arcface": "ArcFaceLoss",
    "cosface": "CosFaceLoss",
    "subcenter_arcface": "SubCenterArcFaceLoss",
    "soft_triple": "SoftTripleLoss",
}


# What rows share.


def compiled(function, *arguments, **options):
    """The compiled function, and how many seconds that took."""
    import jax

    start = time.perf_counter()
    program = jax.jit(function, **options).lower(*arguments).compile()
    return program, time.perf_counter() - start


def seconds(function, repeats: int, wait_fn=None) -> float:
    """Seconds of a call: the mean of `repeats` calls, or of more, until they take a quarter of a
    second together, because an idle GPU has a lower clock. NaN where nothing is timed."""
    import jax

    wait_fn = wait_fn or jax.block_until_ready
    wait_fn(function())
    if COMPILE_ONLY:
        return math.nan
    while True:
        start = time.perf_counter()
        for _ in range(repeats):
            result = function()
        wait_fn(result)
        duration = time.perf_counter() - start
        if duration > 0.25 or repeats >= 1000:
            return duration / repeats
        repeats = min(2 * math.ceil(repeats * 0.25 / duration), 1000)


def peak() -> float | None:
    """Products of bfloat16 a second that the data sheet of this device has."""
    import jax

    kind = jax.devices()[0].device_kind
    return next((rate for name, rate in PEAKS.items() if name in kind), None)


def gib() -> float | None:
    """The largest memory of the device so far; CPUs do not tell."""
    import jax

    stats = jax.local_devices()[0].memory_stats() or {}
    return stats["peak_bytes_in_use"] / 2**30 if "peak_bytes_in_use" in stats else None


def float32_rate(size: int, d: int) -> float:
    """Operations a second of a float32 product of two matrices [size d]."""
    import jax
    import jax.numpy as jnp

    a = jnp.asarray(np.random.default_rng(0).normal(size=(size, d)), jnp.float32)
    product = jax.jit(lambda a: jnp.matmul(a, a.T, precision="highest"))
    return 2 * size**2 * d / seconds(lambda: product(a), 10)


def cuda():
    """torch, where it is installed with CUDA and sees a device, and is timed; else None."""
    if COMPILE_ONLY or importlib.util.find_spec("torch") is None:
        return None
    import torch

    return torch if torch.cuda.is_available() else None


def line(name: str, value: float | None = None, unit: str = "", **cells) -> dict:
    return {"name": name, "value": value, "unit": unit, **cells}


# Rows: sizes -> lines.


def machine(sizes):
    import jax
    import jax.numpy as jnp

    if sizes is FULL and jax.default_backend() == "cpu":
        raise RuntimeError("JAX sees no accelerator: --reduced tries every row on this CPU")
    n = sizes["product"]
    a = jax.random.normal(jax.random.key(0), (n, n), jnp.bfloat16)  # equal numbers draw less power
    product = jax.jit(lambda a: a @ a)
    rate = 2 * n**3 / seconds(lambda: product(a), 10)
    share = None if peak() is None else rate / peak()
    note = f"{jax.devices()[0].device_kind}, jax {jax.__version__}"
    yield line("product, bfloat16", rate / 1e12, "TFLOP/s", share=share, note=note)
    yield line("product, float32", float32_rate(n, n) / 1e12, "TFLOP/s")


def side_of(name, sizes) -> int:
    return sizes["side"] // NETS[name] * NETS[name]


def chosen_net(name, sizes):
    """The net with the fastest form of attention, and a phrase with the times of all forms."""
    import jax
    import jax.numpy as jnp

    from dmljax import nets
    from dmljax.train import attention_choice

    side, options = side_of(name, sizes), {"dtype": jnp.bfloat16}
    if name != "resnet50":
        options |= {"image_size": side}
        options |= {} if sizes["depth"] is None else {"depth": sizes["depth"], "width": 48}
    return attention_choice.choose(
        getattr(nets, name)(**options),
        image_shapes={(side, side, 3)},
        images=sizes["batch"],
        platform=jax.default_backend(),
    )


def attention(sizes):
    """All forms of attention, before other processes use the GPU; later rows read what is kept."""
    for name in list(NETS)[1:]:
        _, note = chosen_net(name, sizes)
        yield line(f"attention of {name}", note=note.removeprefix("attention: "))


def step(sizes, *, name):
    """Train steps with the images on the device, and with images that come from the host."""
    import jax
    import jax.numpy as jnp
    import optax

    from dmljax import losses, methods
    from dmljax.train import attention_choice
    from dmljax.train.compilation import multiply_adds
    from dmljax.train.step import init_state, train_step

    b, side = sizes["batch"], side_of(name, sizes)
    net, _ = chosen_net(name, sizes)
    note = f"attention: {net.attention}" if hasattr(net, "attention") else ""

    def normalize(images):
        return (images / 127.5 - 1).astype(jnp.bfloat16)

    def method_of(net):
        return methods.pairs(net, losses.multi_similarity, classes=b // 4, dim=128)

    method = method_of(net)
    optimizer = optax.adamw(1e-5)
    rng = np.random.default_rng(0)
    host = [
        {
            "images": rng.integers(0, 256, (b, side, side, 3), dtype=np.uint8),
            "labels": np.repeat(np.arange(b // 4), 4).astype(np.int32),
        }
        for _ in range(2)
    ]
    example = {"images": normalize(jnp.asarray(host[0]["images"][:2])), "labels": jnp.zeros(2, int)}
    state = jax.jit(lambda key: init_state(*method.init(key, example), optimizer))(
        jax.random.key(0)
    )
    step_fn = train_step(method, optimizer, normalize_fn=normalize, seed=0)
    batch = jax.device_put(host[0])
    # The operations of attention are counted in its plain form: others hide them.
    plain_fn = train_step(
        method_of(attention_choice.portable(net)), optimizer, normalize_fn=normalize, seed=0
    )
    flops = 2 * multiply_adds(jax.make_jaxpr(plain_fn)(state, batch).jaxpr)
    program, compile_seconds = compiled(step_fn, state, batch, donate_argnums=0)

    def train(batch_fn):
        nonlocal state
        state, metrics = program(state, batch_fn())
        return metrics["loss"]

    waiting = [jax.device_put(host[0])]

    def next_from_host():  # a batch is sent while the one before is used
        waiting.append(jax.device_put(host[len(waiting) % 2]))
        return waiting.pop(0)

    for kind, batch_fn in (("device", lambda: batch), ("host", next_from_host)):
        title = f"{name}, {b} x {side}, bfloat16, images on the {kind}"
        if COMPILE_ONLY:  # steps of several nets at once may not fit into the memory
            yield line(title, compile=compile_seconds)
            continue
        duration = seconds(functools.partial(train, batch_fn), sizes["steps"])
        share = None if peak() is None else flops / duration / peak()
        cells = {"share": share, "gib": gib(), "compile": compile_seconds}
        yield line(title, b / duration, "images/s", note=note, **cells)


def torch_step(sizes, *, name):
    """The same net in torch, with AdamW; SigLIP's net as the ViT of its size."""
    torch = cuda()
    if torch is None:
        yield line(f"{name} in torch", note="skipped: torch with CUDA is not installed")
        return
    b, side = sizes["batch"], side_of(name, sizes)
    if importlib.util.find_spec("timm") is None:
        yield line(f"{name} in torch", note="skipped: timm is not installed")
        return
    import timm

    if name == "resnet50":
        net = timm.create_model("resnet50")
    else:
        options = {"embed_dim": 384, "num_heads": 6} if name == "dinov2_s14" else {}
        options |= {"depth": sizes["depth"] or 12, "patch_size": NETS[name], "img_size": side}
        net = timm.models.VisionTransformer(**options)
    net = net.cuda().train()
    optimizer = torch.optim.AdamW(net.parameters(), 1e-5, fused=True)
    images = torch.rand(b, 3, side, side, device="cuda")

    def train():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = net.forward_features(images).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    rate = b / seconds(train, sizes["steps"], lambda _: torch.cuda.synchronize())
    memory = torch.cuda.max_memory_allocated() / 2**30
    title = f"{name} in torch, {b} x {side}, bfloat16, images on the device"
    yield line(title, rate, "images/s", gib=memory)


def loop(sizes, *, data, augmented=False):
    """Whole runs: sampler, transfer and log included."""
    from dmljax.runs import training
    from dmljax.train.journal import read

    b, side = sizes["batch"], sizes["side"] // 14 * 14
    classes = max(b // 4, 8)
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        images = rng.integers(0, 256, (8 * classes, side, side, 3), dtype=np.uint8)
        np.savez(f"{folder}/d.npz", images=images, labels=np.repeat(np.arange(2 * classes), 4))
        net = {"name": "dinov2_s14", "dtype": "bfloat16", "image_size": side}
        net |= {} if sizes["depth"] is None else {"depth": sizes["depth"]}
        config = {
            "dataset": {"name": "npz", "path": f"{folder}/d.npz", "split": 0.5},
            "transform": AUGMENTED | {"size": side} if augmented else "unchanged",
            "eval_transform": "unchanged",
            "sampler": {"name": "class_balanced", "classes": b // 4, "per_class": 4},
            "net": net,
            "method": {"name": "pairs"},
            "loss": {"name": "multi_similarity"},
            "steps": sizes["run"],
            "log_every": max(sizes["run"] // 3, 1),
            "checkpoint": {"every": sizes["run"]},  # none while the speed is measured
            "evaluate": {"clustering": False, "ks": [1], "batch_size": b},
            "pictures": None,
            "runtime": {"devices": 1, "data": data},
        }
        training.run(config, f"{folder}/run")
        rows = read(f"{folder}/run/speed.jsonl")
    waited = rows[-1]["input_wait_seconds"] / rows[-1]["step_seconds"]
    cells = {"gib": gib(), "compile": rows[-1]["compile_seconds"]}
    title = f"run of dinov2_s14, {b} x {side}, data on the {data}"
    title += ", cropped, flipped and colored there" if augmented else ""
    note = f"{waited:.0%} of the time waiting for input"
    yield line(title, rows[-1]["images_per_second"], "images/s", note=note, **cells)


def evaluation(sizes, *, key, forms):
    """MAP@R of every query by the forms of `FORMS`."""
    from evaluation import products

    from dmljax import metrics, retrieval
    from dmljax.train import compilation

    n, classes, d = sizes[key]
    x, labels = products(n, classes, d)
    rate = float32_rate(min(n, sizes["product"]), d)
    results = {}
    for form in forms:

        def score(form=form):
            results[form] = np.full(n, np.nan)
            for block in retrieval.ranks(x, labels, filter_dtype=FORMS[form]):
                results[form][block.queries] = metrics.map_at_r(block.ranks)

        before = compilation.compiled().seconds
        duration = seconds(score, 1)
        compile_seconds = compilation.compiled().seconds - before
        cells = {"share": 2 * n**2 * d / duration / rate, "gib": gib(), "compile": compile_seconds}
        different = ~np.isclose(results[form], results[forms[0]], rtol=0, atol=0, equal_nan=True)
        note = f"{different.sum():,} of {n:,} queries differ from {forms[0]}"
        yield line(f"ranks of {n:,} x {d}, {form}", duration, "s", note=note, **cells)


def nearest(sizes):
    from evaluation import products

    from dmljax import retrieval

    n, classes, d = sizes["eval"]
    x, _ = products(n, classes, d)
    rate = float32_rate(min(n, sizes["product"]), d)
    for k in (10, 100):
        duration = seconds(lambda k=k: retrieval.nearest(x, k=k), 1)
        share = 2 * n**2 * d / duration / rate
        yield line(f"nearest {k} of {n:,} x {d}", duration, "s", share=share, gib=gib())


def kmeans(sizes):
    from evaluation import products

    from dmljax import retrieval

    n, classes, d = sizes["eval"]
    x, _ = products(n, classes, d)
    retrieval.kmeans(x, k=classes, iterations=2)  # compiles
    if COMPILE_ONLY:
        return
    start = time.perf_counter()
    retrieval.kmeans(x, k=classes, iterations=sizes["iterations"])
    title = f"k-means of {n:,} x {d}, k={classes:,}, {sizes['iterations']} iterations"
    yield line(title, time.perf_counter() - start, "s", gib=gib())


def loss(sizes, *, names, key):
    """Losses with their gradients; where `key` is 'tiled', in tiles of 4,096 rows."""
    from dmljax import losses

    b, d = sizes[key], 128
    rng = np.random.default_rng(0)
    x, other = rng.normal(size=(2, b, d)).astype(np.float32)
    labels = (np.arange(b) // 4).astype(np.int32)
    for name in names:
        title = f"{name}, batch {b:,} x {d}, with gradient{', tiled' * (key == 'tiled')}"
        try:
            second = other if name in VIEWS else labels
            yield one_loss(title, getattr(losses, name), x, second, tiled=key == "tiled")
        except Exception as error:
            yield line(title, error=short(error))


def one_loss(title, function, x, second, *, tiled):
    """`second` are labels, or the other view of each image."""
    import jax

    arguments, numbers = [x, second], (0,) if second.ndim == 1 else (0, 1)
    if has_proxies := "proxies" in inspect.signature(function).parameters:
        classes = int(second.max()) + 1
        rows = {"subcenter_arcface": (classes, 3), "soft_triple": (classes, 10)}
        shape = (*rows.get(function.__name__, (classes,)), x.shape[1])
        arguments.append(np.random.default_rng(1).normal(size=shape).astype(np.float32))
        numbers = (0, 2)
    value = functools.partial(function, tile=4096) if tiled else function
    arguments = jax.device_put(tuple(arguments))
    program, compile_seconds = compiled(jax.value_and_grad(value, argnums=numbers), *arguments)
    if COMPILE_ONLY:
        return line(title, compile=compile_seconds)
    duration = seconds(lambda: program(*arguments), 5)
    memory = program.memory_analysis().temp_size_in_bytes / 2**30
    cells = {"gib": memory, "compile": compile_seconds}
    try:
        theirs = peer_seconds(function.__name__, x, second, has_proxies, tiled)
        cells["torch"] = None if theirs is None else 1e3 * theirs
    except Exception as error:  # such as a lack of memory
        cells["note"] = f"torch: {short(error)}"
    return line(title, 1e3 * duration, "ms", **cells)


def peer_seconds(name, x, second, has_proxies, tiled):
    """Seconds of the peer on the GPU; None where there is none."""
    torch = cuda()
    has_peer = importlib.util.find_spec("pytorch_metric_learning") is not None and name in PEERS
    if torch is None:
        return None
    if has_peer and not tiled:
        import pytorch_metric_learning.losses as peers

        options = {"num_classes": int(second.max()) + 1, "embedding_size": x.shape[1]}
        criterion = getattr(peers, PEERS[name])(**options if has_proxies else {}).cuda()
        rows = torch.tensor(x, device="cuda", requires_grad=True)
        labels = torch.tensor(second, device="cuda", dtype=torch.long)

        def step():
            criterion(rows, labels).backward()

    elif name in IN_TORCH:
        step = torch_loss(name, x, second, TORCH_ROWS if tiled else None, "cuda")
    else:
        return None
    return seconds(step, 3, lambda _: torch.cuda.synchronize())


def softmax(sizes):
    """The softmax over very many classes, at once and in tiles of classes."""
    from dmljax import losses, ops

    b, d, c = sizes["batch"], 128, sizes["classes"]
    rng = np.random.default_rng(0)
    x = rng.normal(size=(b, d)).astype(np.float32)
    labels = rng.integers(0, c, b).astype(np.int32)
    labels[-1] = c - 1
    title = f"normalized_softmax, {b} x {d}, {c:,} classes, with gradient"
    yield one_loss(title, losses.normalized_softmax, x, labels, tiled=False)
    in_tiles = functools.partial(losses.normalized_softmax, tiles=ops.ClassTiles(sizes["tile"]))
    in_tiles.__name__ = "normalized_softmax"
    yield one_loss(f"{title}, in tiles of {sizes['tile']:,}", in_tiles, x, labels, tiled=False)


def images(sizes):
    """JPEG files of 500 x 375 through the input pipeline, by all cores of this host."""
    from PIL import Image

    from dmljax.data import datasets, pipeline, sampling, transforms

    rng, b = np.random.default_rng(0), min(64, sizes["photos"])
    with tempfile.TemporaryDirectory() as folder:
        for i in range(sizes["photos"]):
            small = rng.integers(0, 256, (12, 16, 3), dtype=np.uint8)
            picture = Image.fromarray(small).resize((500, 375), Image.Resampling.BICUBIC)
            path = pathlib.Path(folder, f"c{i // 4}", f"{i}.jpg")
            path.parent.mkdir(exist_ok=True)
            picture.save(path, quality=90)
        split = datasets.folder(root=folder, split=1.0).train
        cores = len(os.sched_getaffinity(0))
        for workers in (0, *([cores // 2] if cores > 4 else [])):
            with pipeline.train(
                split,
                sample_fn=functools.partial(sampling.uniform, batch_size=b),
                transform_fn=functools.partial(transforms.standard_train, size=sizes["side"]),
                seed=0,
                workers=workers,
            ) as batches:
                iterator = iter(batches)
                count = 4 * max(cores, 4)
                for _ in range(count):  # more than are made ahead
                    next(iterator)
                start = time.perf_counter()
                for _ in range(count):
                    next(iterator)
                duration = time.perf_counter() - start
            title = f"JPEGs of 500 x 375, decoded and cropped, runtime.workers={workers}"
            yield line(title, count * b / duration, "images/s", note=f"{cores} cores")


def tests(sizes):
    """The tests that need a GPU; elsewhere they are skipped."""
    del sizes
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu"]
    command += ["-p", "no:benchmark"]  # it warns of pytest-xdist, and a warning is an error
    workers = max(len(os.sched_getaffinity(0)) // 2, 1)
    command += [f"-n{workers}"] if importlib.util.find_spec("xdist") else []
    command += ["--maxfail=0", "-vv", str(ROOT / "tests" / "gpu")]
    environment = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "XLA_FLAGS": ""}
    environment.setdefault("JAX_PLATFORMS", "")
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    last = ""
    with subprocess.Popen(command, cwd=ROOT, env=environment, **output) as process:
        for text in process.stdout:
            last = text.strip("= \n") or last
            # At once, because the row may be killed. The first form is that of pytest-xdist.
            forms = r"^\[gw.* (?:FAILED|ERROR) (\S+)|^(tests\S+) (?:FAILED|ERROR)"
            if found := re.search(forms, text):
                yield line(found[1] or found[2], error="failed")
    if process.returncode:
        raise RuntimeError(last)
    yield line("tests that need a GPU", note=last)


def deterministic(sizes):
    """Two runs with runtime.deterministic: are all numbers the same, bit for bit?"""
    runs = list(itertools.product(("convnet", "resnet18"), "ab"))  # ResNets pool by the maximum
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(runs)) as pool:
        images = np.random.default_rng(0).integers(0, 256, (512, 32, 32, 3), np.uint8)
        np.savez(f"{folder}/data.npz", images=images, labels=np.arange(512) // 8)

        def metrics_of(net, run):
            workdir = f"{folder}/{net}-{run}"
            command = [sys.executable, "-m", "dmljax.main", "train", f"--workdir={workdir}"]
            command += [f"--config={ROOT / 'configs' / 'glyphs.py'}"]
            data = f"{{'name': 'npz', 'path': '{folder}/data.npz', 'split': 0.5}}"
            command += [f"--config.dataset={data}"]
            command += [f"--config.net={{'name': {net!r}, 'dtype': 'bfloat16'}}"]
            command += [f"--config.steps={sizes['run']}", "--config.log_every=1"]
            command += ["--config.pictures=None", "--config.runtime.deterministic=True"]
            command += ["--config.evaluate.clustering=None"]
            done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
            if done.returncode:
                raise RuntimeError(f"{net}: {last_words(done.stderr)}")
            return pathlib.Path(workdir, "metrics.jsonl").read_bytes()

        metrics = dict(zip(runs, pool.map(metrics_of, *zip(*runs, strict=True)), strict=True))
    for net in dict(runs):
        if metrics[net, "a"] != metrics[net, "b"]:
            raise RuntimeError(f"runtime.deterministic: two runs of {net} differ")
        title = f"runtime.deterministic, two runs of {net}"
        yield line(title, note=f"equal bit for bit, {len(metrics[net, 'a']):,} bytes")


# In the order of their importance, because a first call may end before the last rows.
ROWS = {"machine": machine, "attention": attention}
ROWS |= {f"step {name}": functools.partial(step, name=name) for name in NETS}
ROWS |= {
    "evaluation": functools.partial(evaluation, key="eval", forms=list(FORMS)[::-1]),
    "losses": functools.partial(loss, names=LOSSES, key="loss"),
    "losses, tiled": functools.partial(loss, names=TILED, key="tiled"),
    "softmax": softmax,
    "kmeans": kmeans,
    "nearest": nearest,
    "run, host": functools.partial(loop, data="host"),
    "run, device": functools.partial(loop, data="device"),
    "run, device, augmented": functools.partial(loop, data="device", augmented=True),
    "deterministic": deterministic,
    "tests": tests,
    "evaluation, large": functools.partial(evaluation, key="large", forms=list(FORMS)[1:]),
    "images": images,
}
ROWS |= {f"torch {name}": functools.partial(torch_step, name=name) for name in NETS}
UNTIMED = ("tests", "deterministic")
PARTS = {"losses": 3, "losses, tiled": 3}  # processes of a row in the first stage
NOTHING_TO_COMPILE = ("machine", "attention", "images", "torch")  # beginnings of names


# The runner: imports no jax, because only the process of a row may hold the device.


def short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def last_words(log: str) -> str:
    """The last line that is no warning, if there is one."""
    texts = log.strip().splitlines()
    errors = [text for text in texts if not re.match(r"WARNING|[WI]\d{4} ", text)]
    return (errors or texts or [""])[-1][:300]


class Running(NamedTuple):
    name: str
    process: subprocess.Popen
    output: IO[str]
    errors: IO[str]
    start: float


def begin(name: str, words: Sequence[str], environment: dict[str, str]) -> Running:
    files = [tempfile.TemporaryFile("w+", errors="replace") for _ in range(2)]  # noqa: SIM115
    command = [sys.executable, __file__, "--row", name, *words]
    process = subprocess.Popen(
        command, stdout=files[0], stderr=files[1], env=environment, start_new_session=True
    )
    return Running(name, process, *files, time.monotonic())


def end(row: Running) -> list[dict]:
    """The lines of a row, which is killed if it still runs; its error is a line, too."""
    error = None
    with row.output, row.errors:
        if row.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(row.process.pid, signal.SIGKILL)  # also what the row has started
            error = f"no result within {time.monotonic() - row.start:.0f} s"
        elif row.process.returncode:
            row.errors.seek(0)
            error = last_words(row.errors.read()) or f"exit status {row.process.returncode}"
        row.process.wait()
        row.output.seek(0)
        texts = [text for text in row.output if text.startswith("line ") and text.endswith("\n")]
        lines = [json.loads(text[5:]) for text in texts]
    return [*lines, *([] if error is None else [line(row.name, error=error)])]


def first_stage() -> list[tuple[str, list[str]]]:
    """Rows and words of their commands."""
    rows = []
    for name in ROWS:
        if not name.startswith((*UNTIMED, *NOTHING_TO_COMPILE)):
            rows += [(name, [f"--compile={part}"]) for part in range(PARTS.get(name, 1))]
    return rows


def run_rows(
    rows: Sequence[tuple[str, Sequence[str]]],
    environment: dict[str, str],
    done_fn: Callable[[str, list[dict]], None],
    *,
    jobs: int,
    limit: float,
) -> None:
    """Calls `done_fn(name, lines)` whenever the process of a row ends.

    A row is its name and further words of its command. At most `jobs` rows run at once. None begins
    in the last 5 of `limit` seconds, and what runs at their end is killed.
    """
    start, waiting, running = time.monotonic(), list(rows), []
    try:
        while waiting or running:
            remaining = limit - (time.monotonic() - start)
            while waiting and remaining < 5:
                name, _ = waiting.pop(0)
                done_fn(name, [line(name, error="no time was left")])
            while waiting and len(running) < jobs:
                running.append(begin(*waiting.pop(0), environment))
            for row in list(running):
                if remaining <= 0 or row.process.poll() is not None:
                    running.remove(row)
                    done_fn(row.name, end(row))
            time.sleep(0.05)
    finally:  # such as Ctrl-C, which does not reach a session of its own
        for row in running:
            end(row)


def code() -> str:
    """A digest of the code that is measured."""
    files = [*sorted(ROOT.glob("dmljax/**/*.py")), *sorted(ROOT.glob("benchmarks/*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:8]


def earlier_results(out: pathlib.Path) -> dict:
    """What an earlier call has written. Ends at once where nothing can be read or written."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        (temporary := out.with_suffix(".tmp")).touch()
        temporary.unlink()
        results = json.loads(out.read_text()) if out.exists() else {}
        rows = [lines for name, lines in results.items() if name != "device"]
        if not all(isinstance(cells["name"], str) for cells in itertools.chain(*rows)):
            raise TypeError("a line without a name")
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise SystemExit(f"{out} cannot be used ({error}): give another --out") from None
    return results


def table(results: dict[str, list[dict]]) -> str:
    """Formats all lines as Markdown."""
    names = ("value", "share", "gib", "compile", "torch")
    titles = "| row | value | unit | share | GiB | compile, s | torch | note |\n|" + "---|" * 8
    rows = [titles]
    for cells in (cells for name in ROWS for cells in results.get(name, ())):
        numbers = {name: cells.get(name) for name in names}
        texts = {name: "" if x is None else f"{x:.4g}" for name, x in numbers.items()}
        if numbers["share"] is not None:
            texts["share"] = f"{numbers['share']:.1%}"
        note = f"ERROR {cells['error']}" if "error" in cells else cells.get("note", "")
        unit = cells.get("unit", "")
        cells = [cells["name"], texts["value"], unit, *list(texts.values())[1:], note]
        rows.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def end_with_parent() -> None:
    """Ends this row, and what it has started, when the command was killed: it holds the device."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def print_lines(args: argparse.Namespace) -> None:
    """What the process of a row does."""
    global COMPILE_ONLY
    COMPILE_ONLY = args.compile is not None
    row = ROWS[args.row]
    if COMPILE_ONLY and args.row in PARTS:
        row = functools.partial(row, names=row.keywords["names"][args.compile :: PARTS[args.row]])
    try:
        for cells in row(REDUCED if args.reduced else FULL):
            print("line " + json.dumps(cells), flush=True)
    except Exception as error:
        print("line " + json.dumps(line(args.row, error=short(error))), flush=True)


def measure(args: argparse.Namespace, environment: dict[str, str]) -> dict[str, list[dict]]:
    """The lines of all rows, which are also written as they come."""
    start = time.monotonic()
    results = earlier_results(args.out)
    flags = ["--reduced"] * args.reduced
    lines_of_machine: dict[str, list[dict]] = {}
    run_rows([("machine", flags)], environment, lines_of_machine.__setitem__, jobs=1, limit=120)
    machine_line = lines_of_machine["machine"][0]
    if "error" in machine_line:
        raise SystemExit(machine_line["error"])
    note = [machine_line.get("note"), args.reduced, code()]
    if results and (other := results.pop("device", note)) != note:
        raise SystemExit(
            f"{args.out} has results of {other}, and this call would add results of {note} (device "
            "and version of jax; whether sizes are reduced; digest of the code): give another --out"
        )
    results["machine"] = lines_of_machine["machine"]
    compile_seconds: dict[str, float] = {}

    def log(text: str) -> None:
        print(f"{time.monotonic() - start:4.0f} s  {text}", file=sys.stderr, flush=True)

    def save(name: str, lines: list[dict]) -> None:
        log(name)
        for cells in lines:
            if cells["name"] in compile_seconds:
                cells["compile"] = compile_seconds[cells["name"]]
        results[name] = lines
        temporary = args.out.with_suffix(".tmp")
        temporary.write_text(json.dumps({"device": note, **results}, indent=1))
        temporary.replace(args.out)
        args.out.with_suffix(".md").write_text(table(results))

    def save_first(name: str, lines: list[dict]) -> None:
        errors = [cells["error"] for cells in lines if "error" in cells]
        log(", ".join([f"{name}: first stage", *errors]))
        compile_seconds.update({c["name"]: c["compile"] for c in lines if "compile" in c})

    def run_stage(rows, done_fn=save, jobs: int = 1, share: float = 1.0) -> None:
        wanted = []
        for name, words in rows:
            is_done = name in results and not any("error" in cells for cells in results[name])
            if not is_done and name.startswith(tuple(args.rows)):
                wanted.append((name, [*flags, *words]))
        limit = 60 * args.minutes * share - (time.monotonic() - start)
        run_rows(wanted, environment, done_fn, jobs=jobs, limit=limit)

    run_stage([(name, []) for name in ROWS if name == "attention"], share=0.25)
    run_stage(first_stage(), save_first, args.jobs, 0.5)
    run_stage([(name, []) for name in ROWS if name not in UNTIMED])
    run_stage([(name, []) for name in ROWS if name in UNTIMED], jobs=len(UNTIMED))
    return results


def main() -> int:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--reduced", action="store_true", help="tiny sizes, for a CPU")
    parser.add_argument("--rows", nargs="+", default=[""], help="beginnings of names of rows")
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="after as many minutes no further row begins"
    )
    parser.add_argument(
        "--jobs", type=int, default=max(cores // 4, 1), help="processes that compile at once"
    )
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("accelerator.json"))
    parser.add_argument("--row", choices=list(ROWS), help=argparse.SUPPRESS)
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        end_with_parent()
        print_lines(args)
        return 0
    if args.jobs < 1:
        parser.error(f"--jobs={args.jobs}: one process or more")
    if unknown := [x for x in args.rows if not any(name.startswith(x) for name in ROWS)]:
        parser.error(f"no row begins with {unknown[0]!r}: there are {', '.join(ROWS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the rows, too
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        environment = os.environ | {
            "TMPDIR": folder,  # what a killed row leaves is removed, too
            "JAX_ENABLE_COMPILATION_CACHE": "true",
            "JAX_COMPILATION_CACHE_DIR": f"{folder}/programs",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # processes share the memory; so do peers
        }
        results = measure(args, environment)
    print(table(results))
    has_error = any("error" in cells for name in ROWS for cells in results.get(name, ()))
    if has_error:
        print("The same command repeats rows that have an error.", file=sys.stderr)
    return int(has_error)


if __name__ == "__main__":
    raise SystemExit(main())
