"""The verbs of the command line, one file each: its help, its flags, and what it calls.

A verb is a name in `VERBS` of `dmljax/main.py`, and a module with a docstring (its help),
`add_arguments(parser)` and `run(arguments, extras) -> exit status`, where `extras` are the words
that its flags do not cover, such as `--config.steps=500`. Importing a verb must not import jax: the
command line sets flags of XLA before jax starts.
"""
