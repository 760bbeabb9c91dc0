"""The example of every public function of `losses`, `miners`, `metrics` and `retrieval` runs.

An example is a `>>>` block of at most four lines, which shows a call and what it gives. It may use
`np`, `jax`, `jnp`, `functools` and the modules of `dmljax` without importing them.
"""

import doctest
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dmljax import losses, metrics, miners, ops, retrieval

MODULES = {"losses": losses, "miners": miners, "metrics": metrics, "retrieval": retrieval}
NAMESPACE = {"np": np, "jax": jax, "jnp": jnp, "functools": functools, "ops": ops, **MODULES}
FUNCTIONS = {
    f"{module}.{name}": getattr(MODULES[module], name)
    for module in MODULES
    for name in MODULES[module].__all__
    if inspect.isroutine(getattr(MODULES[module], name))
}
# Functions that have no example yet. Delete a name together with writing its example.
NOT_YET = {
    "losses.angular",
    "losses.arcface",
    "losses.center_invariant",
    "losses.circle",
    "losses.clip",
    "losses.contrastive",
    "losses.cosface",
    "losses.cross_batch_memory",
    "losses.fast_ap",
    "losses.generalized_lifted_structure",
    "losses.histogram",
    "losses.intra_pair_variance",
    "losses.label_smoothed_cross_entropy",
    "losses.large_margin_softmax",
    "losses.lifted_structure",
    "losses.lp",
    "losses.margin",
    "losses.multi_similarity",
    "losses.n_pairs",
    "losses.nca",
    "losses.normalized_softmax",
    "losses.ntxent",
    "losses.pnp",
    "losses.proxy_anchor",
    "losses.proxy_nca",
    "losses.proxy_nca_pp",
    "losses.ranked_list",
    "losses.recall_at_k",
    "losses.regular_face",
    "losses.semihard_triplet",
    "losses.siglip",
    "losses.smooth_ap",
    "losses.snr_contrastive",
    "losses.soft_triple",
    "losses.sparse_centers",
    "losses.sphereface",
    "losses.stats",
    "losses.subcenter_arcface",
    "losses.supcon",
    "losses.threshold_consistent_margin",
    "losses.triplet",
    "losses.tuplet_margin",
    "losses.vicreg",
    "losses.weighted_sum",
    "losses.zero_mean",
    "miners.angular",
    "miners.batch_easy_hard",
    "miners.batch_hard",
    "miners.distance_weighted",
    "miners.following",
    "miners.halves",
    "miners.hardest_fraction",
    "miners.multi_similarity",
    "miners.pair_margin",
    "miners.triplet_margin",
    "miners.uniform_histogram",
}


def _examples(name: str) -> doctest.DocTest:
    text = inspect.getdoc(FUNCTIONS[name]) or ""
    return doctest.DocTestParser().get_doctest(text, dict(NAMESPACE), name, None, 0)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_example(name):
    test = _examples(name)
    if name in NOT_YET:
        assert not test.examples, f"{name} has an example: delete it from NOT_YET"
        return
    lines = [line for example in test.examples for line in example.source.splitlines()]
    assert 1 <= len(lines) <= 4, f"{name} has an example of {len(lines)} lines: write 1 to 4"
    function = name.split(".")[1]
    assert any(function in line for line in lines), f"the example does not call {function}"
    assert any(example.want for example in test.examples), "the example shows no result"
    report: list[str] = []
    runner = doctest.DocTestRunner(
        optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE, verbose=False
    )
    failures, _ = runner.run(test, out=report.append)
    assert not failures, "".join(report)


def test_not_yet_lists_only_what_exists():
    assert FUNCTIONS.keys() >= NOT_YET
