"""A function is called in several processes, and the first gives its value back."""

import io
import os

import pytest

from scalejax.errors import ConfigError
from scalejax.launch import ProcessesFailed, Runner

# Every test starts processes that each import JAX.
pytestmark = [pytest.mark.slow, pytest.mark.alone]


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    """Processes look for no accelerator."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


def total(start, step):
    """The sum over the devices of all processes, and what each process is."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    mesh = jax.make_mesh((jax.device_count(),), ("all",), axis_types=(AxisType.Auto,))
    count = jax.device_count()
    values = jax.make_array_from_callback(
        (count,),
        NamedSharding(mesh, PartitionSpec("all")),
        lambda index: jnp.arange(start, start + step * count, step)[index],
    )
    summed = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, PartitionSpec()))(values)
    return int(summed), jax.process_count(), jax.process_index(), os.getpid()


def test_every_process_sees_all_devices_and_the_first_answers():
    """Two processes of two devices: 1 + 3 + 5 + 7."""
    answer, processes, process, pid = Runner(-2, cpu_devices=2, out=io.StringIO()).run(
        total, start=1, step=2
    )

    assert (answer, processes, process) == (16, 2, 0)
    assert pid != os.getpid()


def test_what_is_not_in_a_module_is_sent_along():
    """A function of this function, with what it refers to; also to a single process."""
    word = "of the caller"

    assert Runner(-1, out=io.StringIO()).run(lambda: word) == word


def test_an_error_in_any_process_is_told_with_its_words():
    """Also in one that is otherwise not heard."""

    def fail():
        import jax

        if jax.process_index() == 1:
            raise LookupError("nothing is there")

    out = io.StringIO()
    with pytest.raises(ProcessesFailed, match="fail failed in 2 processes"):
        Runner(-2, out=out).run(fail)

    assert "[1] LookupError: nothing is there" in out.getvalue()


@pytest.mark.parametrize("np", [0, 4])
def test_only_processes_here_can_be_asked_for(np):
    """Minus their number, as in HorovodRunner."""
    with pytest.raises(ConfigError, match=f"np={np} is refused: it must be negative"):
        Runner(np)
