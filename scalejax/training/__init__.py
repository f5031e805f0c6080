"""Training: the step, its state, gradients and optimizers, checkpoints, and the loop."""
