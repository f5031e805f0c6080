"""What every test runs under: eight virtual CPU devices, and no silence about mistakes."""

import os

# A CUDA compiler plug-in without a driver logs an error at every start of JAX.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax

# How fast an example runs says how busy the machine is, not whether the property holds.
hypothesis.settings.register_profile("scalejax", deadline=None)
hypothesis.settings.load_profile("scalejax")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
# Compiling is most of what tests do here; how fast their small programs run is not their matter.
# Workers that compile for a cluster do not inherit this.
jax.config.update("jax_disable_most_optimizations", True)
