"""Faster CPU forms of slow XLA primitives. Tests compare each with its plain form."""
