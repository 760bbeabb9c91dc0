"""Losses, methods and runs give the same numbers on any number of devices."""

import functools
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from losses import test_contract as contract
from methods.one_step import Patches
from processes import ends, python, started
from processes import state as state_of
from system import tiny
from train.pixels import EXACT, RNG, C, Pixels, as_float64, distance, drawn, run_on

from dmljax import losses, methods
from dmljax.nets.vit import ViT
from dmljax.runs import folder as run_folder
from dmljax.runs import training
from dmljax.train import journal
from dmljax.train.devices import Shardings, prefetch

# The ordinary tests compare one device with three, which do not divide the batch, for one loss of
# each kind of computation. Two and eight devices and the other losses are slow tests.
devices_ = pytest.mark.parametrize(
    "devices", [3, pytest.param(2, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)]
)
_cache = {}


def _on_one_device(name, run):
    if name not in _cache:
        _cache[name] = run(1)
    return _cache[name]


QUICK = ("arcface", "clip", "fast_ap", "label_smoothed_cross_entropy", "margin")
QUICK += ("multi_similarity", "supcon", "triplet", "vicreg")


METHODS = ("pairs", "proxies", "graph", "abe")


def _quick(name, names=QUICK):
    return name if name in names else pytest.param(name, marks=pytest.mark.slow)


@devices_
@pytest.mark.parametrize("name", [_quick(name) for name in contract.TABLE])
def test_a_loss_is_the_same_on_any_number_of_devices(name, devices):
    x, labels, extra = as_float64(contract.inputs(b=16))
    rows = {"x": x, "labels": labels, "other": extra.pop("other")}

    def run(devices):
        def loss(x, shared, rows):
            return contract.call(name, x, rows["labels"], {**shared, "other": rows["other"]})

        def value_and_gradients(shared, rows):
            return jax.value_and_grad(loss, argnums=(0, 1))(rows["x"], shared, rows)

        return run_on(devices, value_and_gradients, extra, rows)

    with jax.enable_x64(True):
        one, many = _on_one_device(name, run), run(devices)
    assert one[0].dtype == many[0].dtype == np.float64 and np.linalg.norm(one[1][0]) > 1e-6
    np.testing.assert_allclose(many[0], one[0], rtol=EXACT)
    assert distance(many[1], one[1]) < EXACT


CROSS = functools.partial(losses.label_smoothed_cross_entropy, temperature=0.5)
NORMED = Pixels(norm=True)
VIT = ViT(width=8, heads=2, depth=1, patch=3, image_size=9)
LEARNERS = {"learners": 2, "dim": 6, "split": ("one", "two"), "attention": "two"}
EVERY = {
    "pairs": lambda: methods.pairs(NORMED, losses.multi_similarity, classes=C, dim=5, memory=32),
    "proxies": lambda: methods.proxies(NORMED, losses.proxy_anchor, classes=C, dim=5),
    "semantic_proxies": lambda: methods.semantic_proxies(
        VIT, losses.proxy_anchor, classes=C, dim=5, count=2, depth=1
    ),
    "graph": lambda: methods.graph(NORMED, CROSS, classes=C, dim=8, heads=2, pool_fn=None),
    "dvml": lambda: methods.dvml(NORMED, losses.triplet, classes=C, dim=5, samples=2),
    "abe": lambda: methods.abe(Patches(), losses.contrastive, classes=C, **LEARNERS),
}


@devices_
@pytest.mark.parametrize("name", [_quick(name, METHODS) for name in methods.__all__])
def test_a_method_is_the_same_on_any_number_of_devices(name, devices, without_diagnostics):
    method = EVERY[name]()
    images = RNG.normal(size=(16, 9, 9, 3))
    rows = {"images": images, "labels": (np.arange(16) // 2 % C).astype(np.int32)}
    if name == "graph":  # its messages also pass an image that does not count
        rows["where"] = np.arange(16) != 5
    first = {"images": images[:2].astype(np.float32), "labels": rows["labels"][:2]}
    shapes = jax.eval_shape(method.init, jax.random.key(0), first)
    state = as_float64(drawn(shapes))

    def run(devices):
        def loss(params, model_state, batch):
            key = jax.random.key(1)
            return method.loss(params, model_state, batch, key=key, step=jnp.int32(1))

        def value_and_gradients(state, batch):
            return jax.value_and_grad(loss, has_aux=True)(*state, batch)

        return run_on(devices, value_and_gradients, state, rows)

    with jax.enable_x64(True):
        (one, (after, _)), gradients = run(1)
        (many, (state_on_many, _)), gradients_on_many = run(devices)
    assert one.dtype == np.float64
    exact = 1e-6 if name == "semantic_proxies" else EXACT  # norms of a transformer are float32
    np.testing.assert_allclose(many, one, rtol=exact)
    assert distance(gradients_on_many, gradients) < exact
    if jax.tree.leaves(after):  # batch norm's running means are float32 in any case
        assert distance(state_on_many, after) < 1e-6 < distance(after, state[1])


def _lines(workdir):
    return [x["loss"] for x in journal.read(workdir / "metrics.jsonl") if "loss" in x]


def test_a_run_continues_on_another_number_of_devices(tmp_path, without_diagnostics):
    options = {"evaluate": {"ks": [1], "clustering": None, "batch_size": 16}, "log_every": 1}
    options["net"] = "methods.one_step:Patches"
    proxies = {"method": {"name": "proxies", "dim": 4, "tile": 3}}
    config = tiny(tmp_path, loss={"name": "proxy_anchor"}, **proxies, **options)

    def train(name, devices):
        sharded = {3: "classes", 4: "all", 1: None}[devices]
        runtime = {"devices": devices, "sharded": sharded}
        training.run({**config, "runtime": runtime}, tmp_path / name)
        run, state = run_folder.reopen(tmp_path / name, trust_modules=True)
        return _lines(tmp_path / name), run.class_rows.cut(jax.device_get(state.params))

    first_curve, params = train("on3", 3)
    assert len(first_curve) == 6
    for devices in (4, 1):
        name = f"on{devices}"
        shutil.copytree(tmp_path / "on3", tmp_path / name)
        for step in (4, 6):
            shutil.rmtree(tmp_path / name / "checkpoints" / str(step))
        curve, last = train(name, devices)
        assert curve[:2] == first_curve[:2] and len(curve) == 6
        # In float32: rounding only, which six steps of Adam let grow.
        np.testing.assert_allclose(curve, first_curve, rtol=1e-4)
        assert distance(last, params) < 1e-3


def test_hosts_with_unequal_shares_compute_what_one_device_does(tmp_path):
    """Of 8 images, two hosts hold 4 each on two devices, and the third host holds padding alone."""
    evaluate = {"every": 6, "ks": [1], "clustering": None, "batch_size": 10}
    config = tiny(tmp_path, evaluate=evaluate, checkpoint={"every": 6, "keep": 1})
    config["runtime"] = {"sharded": "all"}
    with started(tmp_path, tmp_path / "hosts", config, processes=3) as process:
        assert "on 6 cpu devices" in ends(process, 0, tmp_path)
    training.run(config | {"runtime": {"devices": 1}}, tmp_path / "one")
    of_hosts, of_one = (journal.read(tmp_path / d / "metrics.jsonl") for d in ("hosts", "one"))
    assert [sorted(x) for x in of_hosts] == [sorted(x) for x in of_one]
    for a, b in zip(of_hosts, of_one, strict=True):
        np.testing.assert_allclose([a[k] for k in a], [b[k] for k in a], rtol=1e-3, atol=1e-5)
    expected, actual = state_of(tmp_path / "one").params, state_of(tmp_path / "hosts").params
    assert distance(actual, expected) < 1e-4


def test_the_next_batch_is_sent_while_a_batch_is_used():
    sent = []

    def batches():
        for i in range(4):
            sent.append(i)
            yield {"x": np.full(8, i)}

    rows = Shardings(jax.devices()[:1]).rows
    for i, batch in enumerate(prefetch(batches(), rows)):
        assert int(batch["x"][0]) == i and sent == list(range(min(i + 2, 4)))


def test_free_memory_below_an_array_is_returned():
    """In a process of its own, with the allocator as the command line sets it."""
    code = (
        "import numpy as np\n"
        "from dmljax import main\n"
        "main.tune_cpu()\n"
        "from dmljax.files import machine\n"
        "def resident(): return int(open('/proc/self/statm').read().split()[1]) * 4096 >> 20\n"
        "block, above = np.ones(200 << 17), np.ones(1 << 17)\n"
        "del block\n"
        "before = resident()\n"
        "machine.trim_memory()\n"
        "print(before - resident())"
    )
    assert 190 < int(python(code).stdout) < 210  # MiB


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    "variables",
    [
        {"XLA_FLAGS": "--xla_force_host_platform_device_count=3", "JAX_NUM_CPU_DEVICES": None},
        {"XLA_FLAGS": None, "JAX_NUM_CPU_DEVICES": "3"},
    ],
)
def test_cpu_devices_have_threads_to_wait_for_each_other(variables):
    """With a thread for each device, runs with `runtime.data=device` waited for ever."""
    code = (
        "import pathlib\n"
        "from dmljax import main\n"
        "main.tune_cpu()\n"
        "import jax\n"
        "jax.block_until_ready(jax.jit(lambda x: x @ x)(jax.numpy.ones((500, 500))))\n"
        "names = [x.read_text() for x in pathlib.Path('/proc/self/task').glob('*/comm')]\n"
        "print(jax.device_count(), sum('XLAEigen' in name for name in names))"
    )
    devices, threads = map(int, python(code, **variables).stdout.split())
    assert devices == 3 and threads >= 12
