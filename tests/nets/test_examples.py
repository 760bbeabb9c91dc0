"""The examples in docstrings run."""

import doctest

import pytest

from dmljax.nets import initializers
from dmljax.nets.layers import impl


@pytest.mark.parametrize("module", [impl, initializers], ids=lambda module: module.__name__)
def test_the_examples_of_a_module_run(module):
    failed, attempted = doctest.testmod(module)
    assert attempted and not failed
