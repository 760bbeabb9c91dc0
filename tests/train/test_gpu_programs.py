"""What XLA compiles for GPUs that are not there, by JAX's plugin for CUDA (`runs.topologies`)."""

import importlib.util
import json
import math
import os
import re

import pytest
from processes import ROOT, command, python
from system import blobs, tiny, write_config

# A folder with the packages jax-cuda13-plugin and jax-cuda13-pjrt, unless they are installed.
PLUGIN = os.environ.get("DMLJAX_CUDA_PLUGIN", "")
needs_plugin = pytest.mark.skipif(
    not PLUGIN and importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="JAX's plugin for CUDA is not installed",
)
# As for users: JAX optimizes.
VARIABLES = {
    "JAX_DISABLE_MOST_OPTIMIZATIONS": None,
    "JAX_COMPILATION_CACHE_DIR": None,
    "XLA_FLAGS": None,
    "PYTHONPATH": os.pathsep.join([str(ROOT), PLUGIN, os.environ.get("PYTHONPATH", "")]),
}
# Its activations are much larger than the 32 MB of scratch memory of a product.
VIT = {"name": "vit_s16", "patch": 4, "image_size": 112, "depth": 4}
VIT |= {"remat": True, "dtype": "bfloat16"}
SIZE = {"name": "standard_eval", "size": 112}


def _lines(folder, config, names):
    words = (
        "train",
        f"--config={write_config(folder, config)}",
        "--dry-run",
        f"--topology={names}",
    )
    done = command(*words, cwd=folder, **VARIABLES)
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


@needs_plugin
def test_a_program_that_does_not_fit_has_a_row(tmp_path):
    """A GPU of 24 GB gives JAX 17.7 GB: 75 % of the 23.6 GB that it has."""
    net = {"name": "convnet", "widths": [8], "strides": [1]}
    large = {"name": "standard_eval", "size": 8192}
    config = tiny(tmp_path, net=net, transform=large, eval_transform=large)
    row = " ".join(_lines(tmp_path, config, "l4:1")[-1])
    assert row.endswith("NVIDIA L4: does not fit into the 17.7 GB that JAX takes of it")


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """The bytes of the temporaries of a step with as many images for each of one and eight GPUs,
    and the instructions of the program for one."""
    folder = tmp_path_factory.mktemp("steps")
    data = {"name": "npz", "path": blobs(folder, classes=16), "split": 0.5}
    config = tiny(folder, dataset=data, net=VIT, transform=SIZE, eval_transform=SIZE)
    script = """if True:
        import json, pathlib, sys
        from dmljax.config.build import build
        from dmljax.runs import dry_run, topologies
        from dmljax.train.loop import compiled_step
        config = json.loads(sys.argv[1])
        for gpus in (1, 8):
            config["sampler"] = {"name": "class_balanced", "classes": gpus, "per_class": 8}
            run = build(config, described=topologies.devices(f"h100:{gpus}"))
            step = compiled_step(run).lower(*dry_run._arguments(run))
            step = step.compile(compiler_options=topologies.GPU_OPTIONS)
            pathlib.Path(f"{gpus}.txt").write_text(step.as_text())
            print(step.memory_analysis().temp_size_in_bytes)
    """
    done = python(script, json.dumps(config), cwd=folder, **VARIABLES)
    program = (folder / "1.txt").read_text()
    instructions = program[program.index("\nENTRY") :].splitlines()
    return list(map(int, done.stdout.split()[-2:])), instructions


@needs_plugin
def test_a_recomputed_block_keeps_its_input_alone_on_several_gpus(steps):
    """XLA's scheduler would put off the gradients of weights, and keep what they need of all blocks
    (`train.loop`): eight GPUs need as much memory as one for as many images each."""
    one, eight = steps[0]
    assert eight < 1.2 * one


@needs_plugin
def test_bfloat16_has_float32_activations_in_norms_and_attention_alone(steps):
    """The results of a program's instructions lie in memory; what is within one does not."""
    wide = []
    for line in steps[1]:
        result, _, operation = line.partition(" = ")[2].partition("(%")
        shapes = [x.split(",") for x in re.findall(r"f32\[([\d,]+)\]", result)]
        if max((math.prod(map(int, x)) for x in shapes), default=0) >= 8 * 785 * 384:
            wide += re.findall(r'op_name="([^"]*)"', operation) or [line]
    assert any("cublas" in line and "/mlp/fc1/" in line for line in steps[1]), "the program is read"
    assert wide and all(re.search(r"/(attn|norm\d?)/", name) for name in wide), wide


@needs_plugin
def test_the_second_part_of_a_vector_is_not_lost(tmp_path):
    """XLA left out a conversion to bfloat16 and back, and the second part became x - x."""
    script = """if True:
        import re
        import jax, numpy as np
        from dmljax.retrieval import filtering
        from dmljax.runs import topologies
        (device,) = topologies.devices("h100:1")
        x = jax.ShapeDtypeStruct(
            (256, 64), np.float32, sharding=jax.sharding.SingleDeviceSharding(device)
        )
        terms = jax.jit(filtering._terms)
        text = terms.lower(x).compile(compiler_options=topologies.GPU_OPTIONS).as_text()
        print(*re.findall(r"subtract\\(%([^,]+), %([^)]+)\\)", text)[0])
    """
    done = python(script, cwd=tmp_path, **VARIABLES)
    minuend, rounded = done.stdout.split()[-2:]
    assert minuend != rounded and rounded.startswith("reduce_precision")
