"""Shapes and types of every public call are checked while testing; an int may stand for a float."""

import functools
import inspect

import jaxtyping
from beartype import BeartypeConf, beartype
from jaxtyping import _import_hook, _storage, install_import_hook

_beartype = beartype(
    conf=BeartypeConf(is_pep484_tower=True, violation_type=jaxtyping.TypeCheckError)
)


def checked(fn):
    """`fn`, which compares its arguments and its result with its annotations at each call.

    jaxtyping's own decorator also binds the arguments to the signature and compares them a second
    time after the call: a run of a few steps takes a tenth longer.
    """
    # The checks of a generator would run later, among the axes of others. jaxtyping ignores names
    # that a module imports for type checkers alone, and that cannot be found.
    if inspect.isgeneratorfunction(fn) or "TYPE_CHECKING" in fn.__globals__:
        return jaxtyping.jaxtyped(fn, typechecker=_beartype)
    checking = _beartype(fn)

    @functools.wraps(fn)
    def call(*args, **keywords):
        if jaxtyping.config.jaxtyping_disable:
            return fn(*args, **keywords)
        _storage.push_shape_memo({})  # the sizes of the axes of this call
        try:
            return checking(*args, **keywords)
        finally:
            _storage.pop_shape_memo()

    return call


_visit_annotated = _import_hook.JaxtypingTransformer.visit_FunctionDef


def install(packages):
    """Checks the calls of all functions of these packages that have annotations.

    jaxtyping also wraps functions without annotations. If such a function is defined in another
    one, it is wrapped again at each call of the outer function, and tests take a tenth longer.
    """
    _import_hook.JaxtypingTransformer.visit_FunctionDef = _visit_function
    install_import_hook(packages, "typechecker.checked")


def _visit_function(self, node):
    arguments = node.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    every += [x for x in (arguments.vararg, arguments.kwarg) if x]
    if node.returns or any(x.annotation for x in every):
        _visit_annotated(self, node)
        # `jaxtyped(typechecker=checked)` becomes `checked`.
        node.decorator_list[-1] = node.decorator_list[-1].keywords[0].value
        return node
    self.generic_visit(node)
    return node
