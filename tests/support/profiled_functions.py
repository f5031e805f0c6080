"""What `test_profile` has workers import: functions that compile, and functions that fail."""

import os
import signal
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec


def two_layers(mesh):
    """Rows over one axis, the hidden layer over the other; its second product must be summed."""

    def sharded(shape, *spec):
        return jax.ShapeDtypeStruct(
            shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec))
        )

    arguments = (
        sharded((1024, 512), "rows"),
        sharded((512, 2048), None, "columns"),
        sharded((2048, 512), "columns"),
    )
    result = NamedSharding(mesh, PartitionSpec("rows"))
    return jax.jit(lambda x, v, w: jnp.tanh(x @ v) @ w, out_shardings=result), arguments


def raises(mesh):
    """A mistake of the user's."""
    print("chatter")
    raise ValueError("odd size")


def is_killed(mesh):
    """What the system does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def aborts(mesh):
    """What a compiler does when it finds itself in the wrong."""
    os.write(2, b"W1121 03:00:00.0 1 noise.cc:1] beware\n")
    os.write(2, b"F1121 03:00:00.0 1 tiles.cc:2] Check failed: no tiles\n")
    os.abort()


def returns_nothing(mesh):
    """A builder that forgets to return."""


def never_ends(mesh):
    """A compiler that takes its time; says in PID_FILE who it is."""
    written = Path(os.environ["PID_FILE"] + ".new")
    written.write_text(str(os.getpid()))
    written.rename(os.environ["PID_FILE"])
    time.sleep(600)
