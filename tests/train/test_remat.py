"""The memory of a compiled train step with recomputed activations."""

import jax
import numpy as np
import pytest
from pretrained import VIT
from system import tiny

from dmljax.config.build import build
from dmljax.runs.dry_run import _arguments
from dmljax.train.loop import compiled_step
from dmljax.train.start import first_state


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="this is about XLA on CPUs")
def test_recomputed_activations_save_memory_on_cpus_and_change_no_value(tmp_path):
    images = np.random.default_rng(0).integers(0, 256, (8, 12, 12, 3)).astype(np.uint8)
    batch = {"images": images, "labels": np.arange(8, dtype=np.int32) // 2}
    memory, norms = [], []
    for remat in ("none", "dots", "blocks"):
        net = VIT | {"depth": 4, "remat": remat}
        run = build(tiny(tmp_path, net=net, runtime={"devices": 1}))
        compiled = compiled_step(run).lower(*_arguments(run)).compile()
        memory.append(compiled.memory_analysis().temp_size_in_bytes)
        _, (metrics, _) = compiled(first_state(run), batch, np.zeros(1, np.int32))
        norms.append(float(metrics["gradient_norm"]))
    assert memory[1] < 0.65 * memory[0] and memory[2] < 0.75 * memory[1]
    np.testing.assert_allclose(norms, norms[0], rtol=1e-4)
