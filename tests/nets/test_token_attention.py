"""Which form of attention a run takes, and what it says about it."""

import functools

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


def _net(**options):
    return nets.vit_s16(width=32, heads=2, depth=1, **options)


def _chosen(net, platform, **options):
    shapes = {(32, 32, 3), (48, 32, 3)}
    return token_attention.choose(net, image_shapes=shapes, platform=platform, **options)


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


def test_on_a_gpu_auto_is_cudnn_where_it_compiles(monkeypatch):
    net, note = _chosen(_net(dtype="bfloat16"), "gpu")  # of this machine, a CPU
    assert net.attention == "plain"
    assert note.startswith("attention: plain (cudnn refused: ") and "\n" not in note
    forms = {**token_attention.FORMS, "cudnn": token_attention.FORMS["xla"]}
    monkeypatch.setattr(token_attention, "FORMS", forms)
    net, note = _chosen(_net(dtype="bfloat16"), "gpu")
    assert net.attention == "cudnn" and note == "attention: cudnn"
    for platform, options in (("gpu", {"may_compile": False}), ("tpu", {})):
        assert _chosen(_net(), platform, **options)[1] == "attention: plain"
    assert _chosen(_net(attention="xla"), "gpu")[1] == "attention: xla (net.attention='xla')"


def test_a_deterministic_run_and_devices_that_are_not_there_compile_nothing(tmp_path, monkeypatch):
    allowed = []

    def choose(net, *, may_compile, **_):
        allowed.append(may_compile)
        return net, ""

    monkeypatch.setattr(token_attention, "choose", choose)
    for runtime, described in (({}, None), ({"deterministic": True}, None), ({}, jax.devices())):
        build(tiny(tmp_path, net=VIT, runtime=runtime), described=described)
    assert allowed == [True, False, False]


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
        ("flash", "attention is one of 'auto', 'plain', 'xla', 'cudnn', not 'flash'"),
        ("cudnn", "attention='cudnn' needs an NVIDIA GPU, and JAX runs on cpu: take 'auto'"),
    ],
)
def test_an_unknown_or_missing_form_is_refused_in_one_line(tmp_path, form, message):
    with pytest.raises(ValueError) as error:
        build(tiny(tmp_path, net=VIT | {"attention": form}))
    assert str(error.value) == message
