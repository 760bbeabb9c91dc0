"""Backbones and heads as Flax modules. `__all__` is the registry of what builds them."""

__all__: list[str] = []
