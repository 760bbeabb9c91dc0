"""Data sets, samplers and input pipelines: numpy and grain, never jax."""
