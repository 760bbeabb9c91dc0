"""Training: the step, the loop, the devices, the optimizers, the checkpoints."""
