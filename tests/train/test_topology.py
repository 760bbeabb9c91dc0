"""`dmljax train --dry-run --topology`: memory of devices that are not there."""

import importlib.util
import json
import os
import re

import jax
import pytest
from processes import ROOT, command, python
from system import tiny, write_config

from dmljax.config.build import build
from dmljax.main import main
from dmljax.runs import dry_run, topologies

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)
WIDE = {"net": {"name": "convnet", "widths": [256, 1024], "strides": [2, 2]}}


# As for users: JAX optimizes. JAX sets TPU_LIBRARY_PATH where it finds libtpu, and others on this
# machine may have loaded libtpu.
VARIABLES = {
    "JAX_DISABLE_MOST_OPTIMIZATIONS": None,
    "JAX_COMPILATION_CACHE_DIR": None,
    "XLA_FLAGS": None,
    "TPU_LIBRARY_PATH": None,
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def _command(folder, config, *flags):
    words = ("train", f"--config={write_config(folder, config)}", "--dry-run", *flags)
    paths = [str(folder), str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return command(*words, cwd=folder, PYTHONPATH=os.pathsep.join(paths), **VARIABLES)


@needs_libtpu
def test_memory_is_that_of_the_program_for_these_devices(tmp_path):
    """With everything split, a device of 8 has an eighth of the state that one alone has."""
    config = tiny(tmp_path, **WIDE, runtime={"sharded": "all"})
    done = _command(tmp_path, config, "--topology=v5e:1x1,v5e:2x4")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("v5e:")]
    assert [(row[0], row[1], " ".join(row[5:])) for row in rows] == [
        ("v5e:1x1", "1", "TPU v5 lite"),
        ("v5e:2x4", "8", "TPU v5 lite"),
    ]
    one, eight = ([float(x) for x in row[2:5]] for row in rows)
    params = sum(x.size for x in jax.tree.leaves(build(config).shapes.params))
    assert one[0] == pytest.approx(12 * params / 1e9, rel=0.05)  # parameters, two moments
    assert eight[0] == pytest.approx(one[0] / 8, rel=0.05)
    for state, temporaries, together in (one, eight):
        assert temporaries > 0 and together == pytest.approx(state + temporaries, rel=0.01)


@needs_libtpu
def test_no_parameter_of_a_large_net_is_allocated(tmp_path):
    """The parameters of DINOv2 g/14 and their moments would take 13.6 GB."""
    net = {"name": "dinov2_g14", "image_size": 28}
    config = tiny(tmp_path, net=net, transform={"name": "standard_eval", "size": 28})
    config |= {"eval_transform": config["transform"], "runtime": {"sharded": "all"}}
    script = """if True:
        import json, resource, sys
        import jax
        from dmljax.config.build import build
        from dmljax.runs import dry_run, topologies
        run = build(json.loads(sys.argv[1]), described=topologies.devices("v5p:4x4x4"))
        state = dry_run._arguments(run)[0]
        sizes = [x.size for x in jax.tree.leaves(state.params)]
        kept = [x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(state.params)]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps([sum(sizes), kept, peak]))
    """
    done = python(script, json.dumps(config), cwd=tmp_path, **VARIABLES)
    count, kept, peak = json.loads(done.stdout.splitlines()[-1])
    assert count > 1.1e9 and [1536, 4096 // 64] in kept
    assert peak < 2e9


@needs_libtpu
def test_an_unknown_name_is_refused_in_one_line(tmp_path):
    for name in ("v5e:3x5", "h101:8", "v5e"):
        done = _command(tmp_path, tiny(tmp_path), f"--topology={name}")
        assert done.returncode == 2 and not done.stdout
        refusal = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert len(refusal) == 1 and f"--topology={name}: take TPUs such as v5e:2x4" in refusal[0]


def test_without_libtpu_the_line_says_what_to_install(tmp_path):
    (tmp_path / "libtpu.py").write_text("raise ImportError\n")  # the process imports from here
    done = _command(tmp_path, tiny(tmp_path), "--topology=v5e:2x4")
    assert done.returncode == 2 and not done.stdout
    expected = r"error: --topology=v5e:2x4: libtpu .* 'libtpu==[\d.*]+', or 'dmljax\[tpu\]'\. .*"
    assert re.fullmatch(expected, done.stderr.strip())


def test_without_the_plugin_for_cuda_the_line_says_what_to_install(tmp_path):
    (tmp_path / "jax_plugins").mkdir()  # the process imports from here
    (tmp_path / "jax_plugins" / "__init__.py").touch()
    done = _command(tmp_path, tiny(tmp_path), "--topology=h100:8")
    assert done.returncode == 2 and not done.stdout
    packages = r"jax-cuda13-plugin==[\d.]+ jax-cuda13-pjrt==[\d.]+"
    expected = f"error: --topology=h100:8: .* {packages}"
    assert re.fullmatch(expected, done.stderr.strip())


def test_operations_of_attention_are_counted_for_described_devices(tmp_path):
    """`xla` hides its products, so the net is built again, for the same devices."""
    net = {"name": "vit_s16", "width": 8, "heads": 2, "depth": 1, "patch": 4, "image_size": 12}
    runs = [
        build(tiny(tmp_path, net=net | {"attention": form}), described=jax.devices()[:2])
        for form in ("plain", "xla")
    ]
    lines = [list(dry_run._of_step(run)) for run in runs]
    assert lines[0] == lines[1] and "floating-point operations" in lines[0][1]


def test_a_second_process_with_libtpu_is_told_what_to_do(monkeypatch):
    def refuse(*_, **__):
        # What libtpu 0.0.42 says.
        text = 'ABORTED: Internal error when accessing libtpu multi-process lockfile. Run "$ sudo'
        raise jax.errors.JaxRuntimeError(text)

    monkeypatch.setattr(topologies, "get_topology_desc", refuse)
    with pytest.raises(ValueError, match="ALLOW_MULTIPLE_LIBTPU_LOAD=1") as refused:
        topologies.devices("v5e:2x4")
    assert "sudo" not in str(refused.value)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--topology=v5e:2x4"], "--topology needs --dry-run"),
        (["--dry-run", "--topology="], "--topology has an empty name"),
        (["--dry-run", "--topology=h100"], "say how many GPUs a host has, such as h100:8"),
        (["--dry-run", "--topology=b200:0x8"], "say how many GPUs a host has, such as b200:8"),
    ],
)
def test_flags_that_say_nothing_are_refused(tmp_path, flags, words):
    file = write_config(tmp_path, tiny(tmp_path))
    with pytest.raises(ValueError, match=words):
        main(["train", f"--config={file}", *flags])


@pytest.mark.parametrize(("name", "host"), [
    ("v5e:1x1", [1, 1, 1]), ("v5e:1x2", [1, 2, 1]), ("v5p:1x1x2", [1, 1, 1]),
    ("v5e:2x4", None), ("v5p:4x4x4", None), ("v5e", None), ("v5e:0x0", None),
])  # fmt: skip
def test_a_host_of_few_chips_has_all_of_them(name, host):
    assert topologies._hosts(name).get("chips_per_host_bounds") == host


def test_a_program_that_does_not_fit_has_a_row(tmp_path, monkeypatch):
    """In the words of XLA, and later topologies are still compiled."""
    real = dry_run._analysis

    def analysis(run, *, options):
        assert options is None
        if run.shards.size == 1:
            # What libtpu 0.0.42 says.
            reason = "Ran out of memory on HBM, the total memory required for HLO temporaries"
            raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {reason} (59.60G)\nmore")
        return real(run, options=options)

    monkeypatch.setattr(dry_run, "_analysis", analysis)
    monkeypatch.setattr(topologies, "devices", lambda name: jax.devices()[: int(name)])
    lines = list(dry_run.lines(tiny(tmp_path), described=["1", "4"]))
    assert lines[-2].split()[:2] == ["1", "1"] and "does not fit: Ran out of memory" in lines[-2]
    assert lines[-2].endswith("(59.60G) (cpu)")
    assert lines[-1].split()[:2] == ["4", "4"] and float(lines[-1].split()[4]) > 0
