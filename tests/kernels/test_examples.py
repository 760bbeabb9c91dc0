"""The examples in docstrings run."""

import doctest

import pytest

from dmljax.kernels import choice, initial_draws


@pytest.mark.parametrize("module", [choice, initial_draws], ids=lambda module: module.__name__)
def test_the_examples_of_a_module_run(module):
    failed, attempted = doctest.testmod(module)
    assert attempted and not failed
