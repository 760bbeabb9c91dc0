"""Published checkpoints: file readers, name maps, registry, conversion."""
