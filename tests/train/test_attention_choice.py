"""Which form of attention a run takes, and what it says about it."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from system import tiny

from dmljax import nets
from dmljax.config.build import build, embedding
from dmljax.nets import token_attention
from dmljax.runs import summary
from dmljax.train import initial_state

VIT = {"name": "vit_s16", "width": 32, "heads": 2, "depth": 1, "patch": 4, "image_size": 12}


def test_on_a_cpu_auto_is_plain_and_the_header_says_so(tmp_path):
    run = build(tiny(tmp_path, net=VIT))
    assert run.net.attention == "plain"
    line = summary.header(run, initial_state.first_state(run))[-1]
    assert "; attention: plain" in line
    assert (
        "attention" not in summary.header(build(tiny(tmp_path)), initial_state.first_state(run))[-1]
    )


def test_a_run_with_a_form_of_gpus_is_exported_with_plain(tmp_path):
    config = build(tiny(tmp_path, net=VIT)).config
    shape = jax.ShapeDtypeStruct((2, 12, 12, 3), np.float32)
    batch, programs = {"images": shape, "labels": jax.ShapeDtypeStruct((2,), np.int32)}, []
    for form in ("plain", "cudnn"):
        method, _ = embedding(config | {"net": config["net"] | {"attention": form}}, classes=4)
        variables = jax.eval_shape(method.init, jax.random.key(0), batch)
        programs.append(str(jax.make_jaxpr(method.embed)(*variables, shape)))
    assert programs[0] == programs[1]


class _Device(NamedTuple):
    platform: str
    compute_capability: str


@pytest.mark.parametrize(
    ("device", "options", "form"),
    [
        (_Device("gpu", "9.0"), {"dtype": "bfloat16"}, "cudnn"),
        (_Device("gpu", "9.0"), {"dtype": None}, "plain"),
        (_Device("gpu", "9.0"), {"dtype": "bfloat16", "heads": 16}, "plain"),
        (_Device("gpu", "9.0"), {"dtype": "bfloat16", "attention": "xla"}, "xla"),
        (_Device("gpu", "7.5"), {"dtype": "bfloat16"}, "plain"),
        (_Device("gpu", "gfx942"), {"dtype": "bfloat16"}, "plain"),
        (_Device("tpu", ""), {"dtype": "bfloat16"}, "plain"),
    ],
)
def test_auto_is_cudnn_for_half_precision_on_nvidia_gpus(device, options, form):
    net = nets.vit_s16(**{"width": 32, "heads": 2, "depth": 1} | options)
    assert token_attention.chosen(net, device).attention == form
    if options.get("attention") is None:
        assert token_attention.chosen(net, device, is_deterministic=True).attention == "plain"


@pytest.mark.parametrize(("queries", "tokens"), [(5, 5), (1, 5), (4, 4), (1, 4), (2, 7)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_token_that_is_added_for_cudnn_changes_nothing(queries, tokens, is_causal):
    """The added token is masked by lengths, which XLA's form takes, too."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, n, 3, 8)).astype(np.float32) for n in (queries, tokens, tokens))
    fns = [
        functools.partial(token_attention.FORMS["cudnn"], implementation="xla"),
        token_attention.FORMS["xla"],
    ]
    for x, y in zip(
        *([f(q, k, v, is_causal), *_gradients(f, q, k, v, is_causal)] for f in fns), strict=True
    ):
        np.testing.assert_allclose(x, y, atol=1e-5)


def _gradients(fn, q, k, v, is_causal):
    return jax.grad(lambda *x: jnp.sum(fn(*x, is_causal) ** 2), argnums=(0, 1, 2))(q, k, v)


@pytest.mark.parametrize("tokens", [197, 257, 1370])
def test_cudnn_takes_every_number_of_tokens(tokens, monkeypatch):
    """The program of a step is made for a GPU; the checks of the machine are left out."""
    cudnn = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda _: True)
    x = jax.ShapeDtypeStruct((2, tokens, 6, 64), jnp.bfloat16)
    gradients = functools.partial(_gradients, token_attention.FORMS["cudnn"], is_causal=False)
    traced = jax.jit(gradients).trace(x, x, x)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "fmhaSoftmaxBackward" in text


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("flash", "attention is one of 'auto', 'plain', 'xla', 'cudnn', 'tokamax', not 'flash'"),
        ("cudnn", "attention='cudnn' needs an NVIDIA GPU, and JAX runs on cpu: take 'auto'"),
        ("tokamax", "attention='tokamax' needs the package: pip install tokamax"),
    ],
)
def test_an_unknown_or_missing_form_is_refused_in_one_line(tmp_path, form, message):
    with pytest.raises(ValueError) as error:
        build(tiny(tmp_path, net=VIT | {"attention": form}))
    assert str(error.value) == message
