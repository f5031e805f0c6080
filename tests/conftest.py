"""What every test runs under: eight virtual CPU devices, and no silence about mistakes."""

import os

# A CUDA compiler plug-in without a driver logs an error at every start of JAX.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
