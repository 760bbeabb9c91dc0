"""What makes processes faster that compile many small programs."""

import functools
import gc


def save_time():
    """Two things that take a fifth of the time of tests that compile many small programs.

    Most objects live until the end, and the garbage collector looks at them again and again. JAX
    makes a new context for each program that it lowers, which takes as long as lowering a small
    program, and keeps all of them: one for all takes half of the memory, too.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    from jax._src.interpreters import mlir

    if hasattr(mlir, "make_ir_context"):  # not public: later versions may have another name
        mlir.make_ir_context = functools.cache(mlir.make_ir_context)
