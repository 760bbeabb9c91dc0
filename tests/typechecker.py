"""Shapes and types of every public call are checked while testing; an int may stand for a float."""

from beartype import BeartypeConf, beartype
from jaxtyping import _import_hook, install_import_hook

check = beartype(conf=BeartypeConf(is_pep484_tower=True))


_visit_annotated = _import_hook.JaxtypingTransformer.visit_FunctionDef


def install(packages):
    """Checks the calls of all functions of these packages that have annotations.

    jaxtyping also wraps functions without annotations. If such a function is defined in another
    one, it is wrapped again at each call of the outer function, and tests take a tenth longer.
    """
    _import_hook.JaxtypingTransformer.visit_FunctionDef = _visit_function
    install_import_hook(packages, "typechecker.check")


def _visit_function(self, node):
    arguments = node.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    every += [x for x in (arguments.vararg, arguments.kwarg) if x]
    if node.returns or any(x.annotation for x in every):
        return _visit_annotated(self, node)
    self.generic_visit(node)
    return node
