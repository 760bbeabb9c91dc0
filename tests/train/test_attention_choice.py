"""Which form of attention a run takes, and what it says about it."""

import jax.numpy as jnp
import pytest
from system import tiny

from dmljax import nets
from dmljax.config.build import build
from dmljax.nets import token_attention
from dmljax.runs import summary
from dmljax.train import attention_choice, initial_state

VIT = {"name": "vit_s16", "width": 32, "heads": 2, "depth": 1, "patch": 4, "image_size": 12}


def _net(**options):
    return nets.vit_s16(width=32, heads=2, depth=1, **options)


def _chosen(net, platform, **options):
    shapes = {(32, 32, 3), (48, 32, 3)}
    return attention_choice.choose(net, image_shapes=shapes, images=4, platform=platform, **options)


def test_on_a_cpu_auto_is_plain_and_the_header_says_so(tmp_path):
    run = build(tiny(tmp_path, net=VIT))
    assert run.net.attention == "plain"
    line = summary.header(run, initial_state.first_state(run))[-1]
    assert "; attention: plain" in line
    assert (
        "attention" not in summary.header(build(tiny(tmp_path)), initial_state.first_state(run))[-1]
    )


def test_on_an_accelerator_all_forms_are_measured_and_a_refusal_is_no_error():
    """The measurement runs on this CPU, where cuDNN refuses."""
    net, note = _chosen(_net(dtype="bfloat16"), "gpu")
    assert net.attention in ("plain", "xla")
    assert note.startswith(f"attention: {net.attention} (5 tokens: plain ") and "7 tokens: " in note
    assert "cudnn refused: ValueError: attention='cudnn' needs an NVIDIA GPU" in note
    assert _chosen(_net(), "gpu", deterministic=True)[0].attention == "plain"
    assert _chosen(_net(attention="xla"), "gpu")[1] == "attention: xla (net.attention='xla')"


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
