"""Which form of attention a run takes, and what it says about it."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from system import tiny

from dmljax import at_hand, nets
from dmljax.config.build import build, embedding
from dmljax.nets import token_attention
from dmljax.runs import summary
from dmljax.train import attention_choice, start

VIT = {"name": "vit_s16", "width": 32, "heads": 2, "depth": 1, "patch": 4, "image_size": 12}


def _net(**options):
    return nets.vit_s16(width=32, heads=2, depth=1, **options)


def _chosen(net, platform, **options):
    shapes = {(32, 32, 3), (48, 32, 3)}
    return attention_choice.choose(net, image_shapes=shapes, images=4, platform=platform, **options)


def test_on_a_cpu_auto_is_plain_and_the_header_says_so(tmp_path):
    run = build(tiny(tmp_path, net=VIT))
    assert run.net.attention == "plain"
    line = summary.header(run, start.first_state(run))[-1]
    assert "; attention: plain" in line
    assert "attention" not in summary.header(build(tiny(tmp_path)), start.first_state(run))[-1]


def test_a_run_with_a_form_of_gpus_is_exported_with_plain(tmp_path):
    config = build(tiny(tmp_path, net=VIT)).config
    shape = jax.ShapeDtypeStruct((2, 12, 12, 3), np.float32)
    batch, programs = {"images": shape, "labels": jax.ShapeDtypeStruct((2,), np.int32)}, []
    for form in ("plain", "cudnn"):
        method, _ = embedding(config | {"net": config["net"] | {"attention": form}}, classes=4)
        variables = jax.eval_shape(method.init, jax.random.key(0), batch)
        programs.append(str(jax.make_jaxpr(method.embed)(*variables, shape)))
    assert programs[0] == programs[1]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty folder in place of the cache of downloads and measurements."""
    monkeypatch.setattr(at_hand, "cache_folder", lambda: tmp_path)
    return tmp_path


def test_on_an_accelerator_all_forms_are_measured_and_a_refusal_is_no_error(cache):
    """The measurement runs on this CPU, where cuDNN refuses."""
    net, note = _chosen(_net(dtype="bfloat16"), "gpu")
    assert net.attention in ("plain", "xla")
    assert note.startswith(f"attention: {net.attention} (4 images of 5 tokens: plain ")
    assert "; 4 images of 7 tokens: " in note
    assert "cudnn refused: ValueError: attention='cudnn' needs an NVIDIA GPU" in note
    assert _chosen(_net(), "gpu", may_measure=False)[0].attention == "plain"
    assert _chosen(_net(attention="xla"), "gpu")[1] == "attention: xla (net.attention='xla')"


def test_the_images_of_a_step_are_measured_unless_they_are_too_many(cache, monkeypatch):
    """With few images, the start of a form takes longer than its computation."""
    measured = []
    times = dict.fromkeys(token_attention.FORMS, 1.0)
    monkeypatch.setattr(token_attention, "milliseconds", lambda **x: measured.append(x) or times)
    shapes = {(224, 224, 3), (1024, 1024, 3)}
    net = _net(dtype=jnp.bfloat16)
    attention_choice.choose(net, image_shapes=shapes, images=512, platform="gpu")
    assert [(x["images"], x["tokens"]) for x in measured] == [(512, 197), (7, 4097)]
    attention_choice.choose(
        net.clone(dtype="bfloat16"), image_shapes=shapes, images=512, platform="gpu"
    )
    assert len(measured) == 2, "one type has one name"


def test_a_deterministic_run_and_devices_that_are_not_there_measure_nothing(tmp_path, monkeypatch):
    allowed = []

    def choose(net, *, may_measure, **_):
        allowed.append(may_measure)
        return net, ""

    monkeypatch.setattr(attention_choice, "choose", choose)
    for runtime, described in (({}, None), ({"deterministic": True}, None), ({}, jax.devices())):
        build(tiny(tmp_path, net=VIT, runtime=runtime), described=described)
    assert allowed == [True, False, False]


@pytest.mark.parametrize("content", [None, "{", "row without a form"])
def test_a_later_process_takes_what_was_measured(cache, monkeypatch, content):
    """A resumed run must not compute with another form. A damaged file is measured again."""
    first = _chosen(_net(), "gpu")[1]
    path = cache / "attention.json"
    for facts in map(json.loads, json.loads(path.read_text())):
        assert facts["device"] == jax.devices()[0].device_kind
        assert facts["packages"]["jax"] == jax.__version__
    if content == "row without a form":
        content = json.dumps({key: {"plain": 1.0} for key in json.loads(path.read_text())})
    if content is not None:
        path.write_text(content)
    calls = []
    monkeypatch.setattr(
        token_attention,
        "milliseconds",
        lambda **sizes: calls.append(sizes) or dict.fromkeys(token_attention.FORMS, 1.0),
    )
    again = _chosen(_net(), "gpu")[1]
    assert (again == first) == (content is None) and len(calls) == (0 if content is None else 2)
    assert len(json.loads(path.read_text())) == 2
    _chosen(_net(), "gpu")
    _chosen(_net(dtype="bfloat16"), "gpu")
    assert len(calls) == (2 if content is None else 4)


def test_what_had_no_memory_is_measured_again(cache, monkeypatch):
    busy = {"cudnn": "XlaRuntimeError: RESOURCE_EXHAUSTED: out of memory"}
    times = dict.fromkeys(token_attention.FORMS, 1.0) | busy
    monkeypatch.setattr(token_attention, "milliseconds", lambda **_: times)
    assert "RESOURCE_EXHAUSTED" in _chosen(_net(), "gpu")[1]
    times |= {"cudnn": 0.5}
    assert _chosen(_net(), "gpu")[0].attention == "cudnn"


def test_the_fastest_form_that_nothing_refuses_is_taken():
    short = {"plain": 1.0, "xla": 3.0, "cudnn": 0.5, "tokamax": "not installed"}
    long = {"plain": 9.0, "xla": 2.0, "cudnn": 0.6, "tokamax": "not installed"}
    assert attention_choice.fastest([short, long]) == "cudnn"
    assert attention_choice.fastest([short, long | {"cudnn": "head of 7"}]) == "xla"
    assert attention_choice.fastest([short | {"cudnn": "head of 7"}]) == "plain"
    assert attention_choice.fastest([dict.fromkeys(short, "out of memory")]) == "plain"


def test_a_form_with_another_result_is_refused(monkeypatch):
    wrong = {**token_attention.FORMS, "xla": lambda q, k, v, is_causal: 2 * v}
    monkeypatch.setattr(token_attention, "FORMS", wrong)
    sizes = {"images": 2, "tokens": 5, "heads": 2, "width": 8, "dtype": jnp.float32}
    times = token_attention.milliseconds(**sizes)
    assert times["xla"] == "its result differs from the result of plain" and times["plain"] > 0


@pytest.mark.parametrize(("queries", "tokens"), [(5, 5), (1, 4), (2, 7)])
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
