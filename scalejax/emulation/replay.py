"""Replay of an emulated run: executes its instruction log, without workers or time.

Each value is freed after the last instruction that reads it, so that no more memory is used than
in the run itself. A gradient that is never read is not computed. Gradients are computed in the
order of the log, several in one program; grouping them changed no bit in the cases tested: small
fully connected networks on CPUs (jax 0.10.2).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import get_args

from scalejax.config.emulation import EmulationConfig
from scalejax.config.run import ResolvedRun
from scalejax.core.errors import ConfigError, ScalejaxError, refusal
from scalejax.emulation.instructions import Instruction, Operation, Value
from scalejax.emulation.run import Lines, executor_of
from scalejax.training.record import Measurement


def replay(
    run: ResolvedRun,
    emulation: EmulationConfig,
    instructions: Sequence[Instruction],
    write: Callable[[Measurement], None],
) -> None:
    """Execute `instructions` as the run that logged them did.

    Args:
        run: the run, on one device.
        emulation: the emulation config.
        instructions: the log, in order.
        write: called with the lines of the record, equal to those of the run.

    Raises:
        ConfigError: if the log is not that of such a run, or examples cannot be read.
    """
    executor = executor_of(run, emulation)
    lines = Lines(run, executor, write)
    last_use = {
        number: place
        for place, each in enumerate(instructions)
        for number in (*each.outputs, *each.inputs)
    }
    values: dict[int, Value] = {}
    operations = get_args(Operation)
    for place, each in enumerate(instructions):
        if each.operation not in operations:
            accepted = f"it must be one of {', '.join(operations)}: the log is damaged"
            raise ConfigError(refusal(f"operation of row {place + 1}", each.operation, accepted))
        if any(number not in values for number in each.inputs):
            number = next(number for number in each.inputs if number not in values)
            accepted = "it must be of values that an earlier row computes: the log is damaged"
            raise ConfigError(refusal(f"inputs of row {place + 1}", number, accepted))
        inputs = tuple(values[number] for number in each.inputs)
        with _executing(each.operation, place):
            contents = executor.execute(
                each.operation, [value.content for value in inputs], each.factors, each.rows
            )
        if len(contents) != len(each.outputs):
            accepted = (
                f"it must be {len(contents)} for {each.operation!r} with emulation.server_shards="
                f"{emulation.server_shards}: the log is of another run, or damaged"
            )
            raise ConfigError(refusal(f"outputs of row {place + 1}", len(each.outputs), accepted))
        for number, content in zip(each.outputs, contents, strict=True):
            values[number] = Value(number, content)
        if each.operation in ("trained", "evaluated", "tested"):
            if not inputs or (len(inputs) > 1 and each.operation != "trained"):
                accepted = f"it must be 1 for {each.operation!r}: the log is damaged"
                raise ConfigError(refusal(f"inputs of row {place + 1}", len(inputs), accepted))
            with _executing(each.operation, place):
                step = int(each.factors[0])
                if not 0 <= step <= run.total_steps:
                    accepted = f"it must be a step of this run, 0 to {run.total_steps}"
                    raise ConfigError(refusal("factors", each.factors[0], accepted))
                lines.tell(each.operation, each.at_seconds, step, inputs)
        del inputs, contents
        for number in {*each.inputs, *each.outputs}:
            if last_use[number] == place:
                del values[number]


@contextmanager
def _executing(operation: str, place: int) -> Iterator[None]:
    """Turn errors of a row that cannot be executed into its refusal.

    A readable file may hold anything in its cells: no factors, samples of no gradient, gradients of
    another shape. All of it is executed, and only the log can be at fault.

    Raises:
        ConfigError: naming the row.
    """
    try:
        yield
    except ScalejaxError:
        raise
    except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError) as error:
        accepted = f"it cannot be executed ({type(error).__name__}): the log is damaged"
        raise ConfigError(refusal(f"operation of row {place + 1}", operation, accepted)) from error
