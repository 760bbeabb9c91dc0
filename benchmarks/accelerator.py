"""Everything that has to be measured on an accelerator, in one table.

    python benchmarks/accelerator.py                # one GPU; no row begins after 8 minutes
    python benchmarks/accelerator.py --reduced      # tiny sizes, on a CPU: does every row work?

Each row is one function and runs in a process of its own, so that an error of a row (which is then
in its line) or a lack of memory does not touch the others. Results are in `--out`, the table beside
it. The same command again repeats what failed or had no time left. `--rows step evaluation` runs
the rows whose names begin so. Peers are measured where they are installed: torch with CUDA, and
pytorch-metric-learning, whose losses have peers of `large_batches.py` where it has none, and for
losses in tiles.

`share` is the model FLOPs utilisation: operations of the products and convolutions of the program,
divided by the time and by the rate that the data sheet gives for bfloat16 (of evaluation: by the
measured rate of a large float32 product). `GiB` is the peak of the process on the device.
"""

import argparse
import functools
import importlib.util
import inspect
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from subprocess import PIPE

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
MEASURED: set[str] = set()  # lines that an earlier call has finished
FORMS = {"float32": None, "filter in float32": "float32", "filter in bfloat16": "bfloat16"}
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


def compiled(function, *arguments):
    """The compiled function, and how many seconds that took."""
    import jax

    start = time.perf_counter()
    program = jax.jit(function).lower(*arguments).compile()
    return program, time.perf_counter() - start


def seconds(function, repeats: int) -> float:
    """Seconds of a call, after one that is not counted."""
    import jax

    jax.block_until_ready(function())
    start = time.perf_counter()
    for _ in range(repeats):
        result = function()
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / repeats


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
    """torch, where it is installed with CUDA and sees a device; else None."""
    if importlib.util.find_spec("torch") is None:
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


def step(sizes, *, name):
    """Train steps with the images on the device, and with images that come from the host."""
    import jax
    import jax.numpy as jnp
    import optax

    from dmljax import losses, methods, nets
    from dmljax.train import attention_choice
    from dmljax.train.compilation import multiply_adds
    from dmljax.train.step import init_state, train_step

    b, side = sizes["batch"], sizes["side"] // NETS[name] * NETS[name]
    options = {"dtype": jnp.bfloat16}
    if name != "resnet50":
        options |= {"image_size": side}
        options |= {} if sizes["depth"] is None else {"depth": sizes["depth"], "width": 48}
    net, note = attention_choice.choose(
        getattr(nets, name)(**options),
        image_shapes={(side, side, 3)},
        images=b,
        platform=jax.default_backend(),
    )

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
    start = time.perf_counter()
    program = jax.jit(step_fn, donate_argnums=0).lower(state, batch).compile()
    compile_seconds = time.perf_counter() - start

    def train(batch_fn):
        nonlocal state
        state, metrics = program(state, batch_fn())
        return metrics["loss"]

    waiting = [jax.device_put(host[0])]

    def next_from_host():  # a batch is sent while the one before is used
        waiting.append(jax.device_put(host[len(waiting) % 2]))
        return waiting.pop(0)

    for kind, batch_fn in (("device", lambda: batch), ("host", next_from_host)):
        duration = seconds(functools.partial(train, batch_fn), sizes["steps"])
        share = None if peak() is None else flops / duration / peak()
        cells = {"share": share, "gib": gib(), "compile": compile_seconds}
        title = f"{name}, {b} x {side}, bfloat16, images on the {kind}"
        yield line(title, b / duration, "images/s", note=note, **cells)


def torch_step(sizes, *, name):
    """The same net in torch, with AdamW; SigLIP's net as the ViT of its size."""
    torch = cuda()
    if torch is None:
        yield line(f"{name} in torch", note="skipped: torch with CUDA is not installed")
        return
    b, side = sizes["batch"], sizes["side"] // NETS[name] * NETS[name]
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

    for _ in range(3):
        train()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(sizes["steps"]):
        train()
    torch.cuda.synchronize()
    rate = b * sizes["steps"] / (time.perf_counter() - start)
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
            "evaluate": {"clustering": False, "ks": [1], "batch_size": b},
            "pictures": False,
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
    """MAP@R of every query by the forms of `FORMS`; those with a filter must agree bit for bit."""
    from evaluation import products

    from dmljax import metrics, retrieval

    n, classes, d = sizes[key]
    x, labels = products(n, classes, d)
    rate = float32_rate(min(n, sizes["product"]), d)
    results = {}
    for form in forms:

        def scores(dtype=FORMS[form]):
            values = np.full(n, np.nan)
            for block in retrieval.ranks(x, labels, filter_dtype=dtype):
                values[block.queries] = metrics.map_at_r(block.ranks)
            return values

        start = time.perf_counter()
        scores()
        middle = time.perf_counter()
        results[form] = scores()
        duration = time.perf_counter() - middle
        compile_seconds = max(middle - start - duration, 0)
        cells = {"share": 2 * n**2 * d / duration / rate, "gib": gib(), "compile": compile_seconds}
        different = ~np.isclose(results[form], results[forms[0]], rtol=0, atol=0, equal_nan=True)
        note = f"{different.sum():,} of {n:,} queries differ from {forms[0]}"
        if {form, forms[0]} == set(list(FORMS)[1:]) and different.any():
            raise RuntimeError(note)
        yield line(f"ranks of {n:,} x {d}, {form}", duration, "s", note=note, **cells)


def kmeans(sizes):
    from evaluation import products

    from dmljax import retrieval

    n, classes, d = sizes["eval"]
    x, _ = products(n, classes, d)
    retrieval.kmeans(x, k=classes, iterations=2)  # compiles
    start = time.perf_counter()
    retrieval.kmeans(x, k=classes, iterations=sizes["iterations"])
    title = f"k-means of {n:,} x {d}, k={classes:,}, {sizes['iterations']} iterations"
    yield line(title, time.perf_counter() - start, "s", gib=gib())


def loss(sizes, *, names, key):
    """Losses with their gradients; where `key` is 'tiled', by `losses.tiled`."""
    from dmljax import losses

    b, d = sizes[key], 128
    rng = np.random.default_rng(0)
    x, other = rng.normal(size=(2, b, d)).astype(np.float32)
    labels = (np.arange(b) // 4).astype(np.int32)
    for name in names:
        title = f"{name}, batch {b:,} x {d}, with gradient{', tiled' * (key == 'tiled')}"
        if title in MEASURED:
            continue
        try:
            second = other if name in VIEWS else labels
            yield one_loss(title, getattr(losses, name), x, second, tiled=key == "tiled")
        except Exception as error:
            yield line(title, error=short(error))


def one_loss(title, function, x, second, *, tiled):
    """`second` are labels, or the other view of each image."""
    import jax

    from dmljax import losses

    arguments, numbers = [x, second], (0,) if second.ndim == 1 else (0, 1)
    if has_proxies := "proxies" in inspect.signature(function).parameters:
        classes = int(second.max()) + 1
        rows = {"subcenter_arcface": (classes, 3), "soft_triple": (classes, 10)}
        shape = (*rows.get(function.__name__, (classes,)), x.shape[1])
        arguments.append(np.random.default_rng(1).normal(size=shape).astype(np.float32))
        numbers = (0, 2)
    value = losses.tiled(function) if tiled else function
    arguments = jax.device_put(tuple(arguments))
    program, compile_seconds = compiled(jax.value_and_grad(value, argnums=numbers), *arguments)
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
        labels = torch.tensor(second, device="cuda")

        def step():
            criterion(rows, labels).backward()

    elif name in IN_TORCH:
        step = torch_loss(name, x, second, TORCH_ROWS if tiled else None, "cuda")
    else:
        return None
    times = []
    for _ in range(4):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return float(np.median(times[1:]))


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
        with pipeline.train(
            split,
            sample_fn=functools.partial(sampling.uniform, batch_size=b),
            transform_fn=functools.partial(transforms.standard_train, size=sizes["side"]),
            seed=0,
        ) as batches:
            iterator = iter(batches)
            for _ in range(8):
                next(iterator)
            start = time.perf_counter()
            for _ in range(sizes["steps"]):
                next(iterator)
            duration = time.perf_counter() - start
    rate = sizes["steps"] * b / duration
    cores = len(os.sched_getaffinity(0))
    yield line("JPEGs of 500 x 375, decoded and cropped", rate, "images/s", note=f"{cores} cores")


def tests(sizes):
    """The tests that need a GPU; elsewhere they are skipped."""
    del sizes
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "gpu"]
    command += [str(ROOT / "tests" / "gpu")]
    environment = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "XLA_FLAGS": ""}
    environment.setdefault("JAX_PLATFORMS", "")
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    last = [text for text in done.stdout.splitlines() if " passed" in text or " skipped" in text]
    if done.returncode:
        raise RuntimeError("\n".join((done.stdout + done.stderr).splitlines()[-30:]))
    yield line("tests that need a GPU", note=last[-1].strip("= ") if last else "all passed")


def deterministic(sizes):
    """Two runs with runtime.deterministic: are all numbers the same, bit for bit?"""
    for net in ("convnet", "resnet18"):  # ResNets pool by the maximum
        title = f"runtime.deterministic, two runs of {net}"
        yield line(title, note=f"equal bit for bit, {_twice(sizes, net):,} bytes")


def _twice(sizes, net):
    """Bytes of the metrics of two runs, which must be equal."""
    with tempfile.TemporaryDirectory() as folder:
        images = np.random.default_rng(0).integers(0, 256, (512, 32, 32, 3), np.uint8)
        np.savez(f"{folder}/data.npz", images=images, labels=np.arange(512) // 8)
        for run in ("a", "b"):
            command = [sys.executable, "-m", "dmljax.main", "train", f"--workdir={folder}/{run}"]
            command += [f"--config={ROOT / 'configs' / 'glyphs.py'}"]
            data = f"{{'name': 'npz', 'path': '{folder}/data.npz', 'split': 0.5}}"
            command += [f"--config.dataset={data}"]
            command += [f"--config.net={{'name': {net!r}, 'dtype': 'bfloat16'}}"]
            command += [f"--config.steps={sizes['run']}", "--config.log_every=1"]
            command += ["--config.pictures=False", "--config.runtime.deterministic=True"]
            command += ["--config.evaluate.clustering=False"]
            done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
            if done.returncode:
                raise RuntimeError(done.stderr[-2000:])
        a, b = (pathlib.Path(folder, run, "metrics.jsonl").read_bytes() for run in ("a", "b"))
    if a != b:
        raise RuntimeError(f"runtime.deterministic: two runs of {net} differ")
    return len(a)


# In the order of their importance, because a first call may end before the last rows.
ROWS = {"machine": machine}
ROWS |= {f"step {name}": functools.partial(step, name=name) for name in NETS}
ROWS |= {
    "evaluation": functools.partial(evaluation, key="eval", forms=list(FORMS)[::-1]),
    "losses": functools.partial(loss, names=LOSSES, key="loss"),
    "losses, tiled": functools.partial(loss, names=TILED, key="tiled"),
    "softmax": softmax,
    "kmeans": kmeans,
    "run, host": functools.partial(loop, data="host"),
    "run, device": functools.partial(loop, data="device"),
    "run, device, augmented": functools.partial(loop, data="device", augmented=True),
    "deterministic": deterministic,
    "tests": tests,
    "evaluation, large": functools.partial(evaluation, key="large", forms=list(FORMS)[2:]),
    "images": images,
}
ROWS |= {f"torch {name}": functools.partial(torch_step, name=name) for name in NETS}
# Rows that compile what another has compiled. All others measure how long that takes.
CACHED = ("run, host", "run, device", "run, device, augmented", "deterministic", "tests")


# The runner: imports no jax, because only the process of a row may hold the device.


def short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def run_row(name: str, reduced: bool, limit: float, before: Sequence[dict] = ()) -> list[dict]:
    """The lines of a row, from a process of its own; its error is a line, too.

    `before` are its lines of an earlier call.
    """
    finished = {cells["name"]: cells for cells in before if "error" not in cells}
    command = [sys.executable, __file__, "--row", name, *["--reduced"] * reduced]
    command += ["--measured", *finished]
    environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": str(name in CACHED).lower()}
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # peers need memory in this process
    process = subprocess.Popen(
        command, stdout=PIPE, stderr=PIPE, text=True, env=environment, start_new_session=True
    )
    error = None
    try:
        output, errors = process.communicate(timeout=limit)
        if process.returncode:
            last = errors.strip().splitlines()[-1:] or [f"exit status {process.returncode}"]
            error = last[0][:300]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # also what the row has started
        output, _ = process.communicate()
        error = f"no result within {limit:.0f} s"
    except BaseException:  # such as Ctrl-C, which does not reach a session of its own
        os.killpg(process.pid, signal.SIGKILL)
        raise
    texts = [x for x in output.splitlines(keepends=True) if x.startswith("line ")]
    lines = [json.loads(x[5:]) for x in texts if x.endswith("\n")]
    finished |= {cells["name"]: cells for cells in lines}
    return [*finished.values(), *([] if error is None else [line(name, error=error)])]


def table(results: dict[str, list[dict]]) -> str:
    names = ("value", "share", "gib", "compile", "torch")
    titles = "| row | value | unit | share | GiB | compile, s | torch | note |\n|" + "---|" * 8
    rows = [titles]
    for lines in results.values():
        for cells in lines:
            numbers = {name: cells.get(name) for name in names}
            texts = {name: "" if x is None else f"{x:.4g}" for name, x in numbers.items()}
            if numbers["share"] is not None:
                texts["share"] = f"{numbers['share']:.1%}"
            note = f"ERROR {cells['error']}" if "error" in cells else cells.get("note", "")
            unit = cells["unit"]
            cells = [cells["name"], texts["value"], unit, *list(texts.values())[1:], note]
            rows.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--reduced", action="store_true", help="tiny sizes, for a CPU")
    parser.add_argument("--rows", nargs="+", default=[""], help="beginnings of names of rows")
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="after as many minutes no further row begins"
    )
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("accelerator.json"))
    parser.add_argument("--row", choices=list(ROWS), help=argparse.SUPPRESS)
    parser.add_argument("--measured", nargs="*", default=[], help=argparse.SUPPRESS)
    args = parser.parse_args()
    MEASURED.update(args.measured)
    if args.row:
        for cells in ROWS[args.row](REDUCED if args.reduced else FULL):
            print("line " + json.dumps(cells), flush=True)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the row, too
    start = time.monotonic()
    results = json.loads(args.out.read_text()) if args.out.exists() else {}
    machine_lines = run_row("machine", args.reduced, 120)
    if "error" in machine_lines[0]:
        raise SystemExit(machine_lines[0]["error"])
    note = [machine_lines[0].get("note"), args.reduced]
    if results and results.pop("device", note) != note:
        raise SystemExit(f"{args.out} is of another device or of other sizes: give another --out")
    results = {"machine": machine_lines} | {k: v for k, v in results.items() if k != "machine"}
    for name in ROWS:
        is_done = name in results and not any("error" in cells for cells in results[name])
        if is_done or not any(name.startswith(beginning) for beginning in args.rows):
            continue
        remaining = 60 * args.minutes - (time.monotonic() - start)
        if remaining < 5:
            before = [cells for cells in results.get(name, ()) if "error" not in cells]
            late = line(name, error="no time was left: the same command goes on here")
            results[name] = [*before, late]
        else:
            results[name] = run_row(name, args.reduced, remaining, results.get(name, ()))
        print(f"{time.monotonic() - start:4.0f} s  {name}", file=sys.stderr, flush=True)
        ordered = {key: results[key] for key in ROWS if key in results}
        temporary = args.out.with_suffix(".tmp")
        temporary.write_text(json.dumps({"device": note, **ordered}, indent=1))
        temporary.replace(args.out)
        args.out.with_suffix(".md").write_text(table(ordered))
        results = ordered
    print(table(results))
    return int(any("error" in cells for lines in results.values() for cells in lines))


if __name__ == "__main__":
    raise SystemExit(main())
