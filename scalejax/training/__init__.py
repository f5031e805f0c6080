"""The step and what trains with it: state, gradients, optimizers, checkpoints, the loop."""
