"""Large-minibatch training in JAX, and what it would cost on hardware that is not here."""
