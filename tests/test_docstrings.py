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


def _examples(name: str) -> doctest.DocTest:
    text = inspect.getdoc(FUNCTIONS[name]) or ""
    return doctest.DocTestParser().get_doctest(text, dict(NAMESPACE), name, None, 0)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_example_of_a_docstring_runs(name):
    test = _examples(name)
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
