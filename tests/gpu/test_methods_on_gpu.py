"""Losses, methods and runs compute on a GPU what they compute on a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from losses import test_contract as contract
from processes import LONG, same_after_a_kill
from system import METHODS, tiny
from train.pixels import RNG, C, as_float64, distance, drawn
from train.test_devices import EVERY

from dmljax import methods

pytestmark = pytest.mark.gpu
EXACT = 1e-9  # in float64; 1e-12 between CPUs. Norms of a transformer are float32


def _on_both(function, *arguments):
    """The results of a CPU, and those of the GPU, which multiplies float32 in TF32 by default."""
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        return [
            jax.tree.map(np.asarray, jax.jit(function)(*jax.device_put(arguments, device)))
            for device in (jax.devices("cpu")[0], jax.devices()[0])
        ]


@pytest.mark.parametrize("name", list(contract.TABLE))
def test_a_loss_and_its_gradient(name):
    x, labels, extra = as_float64(contract.inputs(b=16))

    def loss(x, extra, labels):
        return contract.call(name, x, labels, extra)

    (value, gradients), (on_gpu, gradients_on_gpu) = _on_both(
        jax.value_and_grad(loss, argnums=(0, 1)), x, extra, labels
    )
    np.testing.assert_allclose(on_gpu, value, rtol=EXACT)
    assert distance(gradients_on_gpu, gradients) < EXACT


@pytest.mark.parametrize("name", methods.__all__)
def test_a_method_and_its_gradient(name):
    method = EVERY[name]()
    batch = {"images": RNG.normal(size=(16, 9, 9, 3)), "labels": np.int32(np.arange(16) // 2 % C)}
    first = {"images": batch["images"][:2].astype(np.float32), "labels": batch["labels"][:2]}
    state = as_float64(drawn(jax.eval_shape(method.init, jax.random.key(0), first)))

    def loss(params, model_state, batch):
        key = jax.random.key(1)
        return method.loss(params, model_state, batch, key=key, step=jnp.int32(1))

    (one, gradients), (other, gradients_on_gpu) = _on_both(
        jax.value_and_grad(loss, has_aux=True), *state, batch
    )
    exact = 1e-5 if name == "semantic_proxies" else EXACT
    np.testing.assert_allclose(other[0], one[0], rtol=exact)
    assert distance(gradients_on_gpu, gradients) < exact


@pytest.mark.parametrize("name", list(METHODS))
def test_a_run_that_is_killed_ends_bitwise_the_same(name, tmp_path):
    """Whole runs as users start them, with `runtime.deterministic`."""
    config = tiny(tmp_path, **METHODS[name] | LONG, runtime={"deterministic": True})
    same_after_a_kill(tmp_path, config, 14)
