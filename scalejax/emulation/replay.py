"""The arithmetic of an emulated run once more, from its log alone: no workers, no time.

Each value is let go after the last instruction that reads it, so that no more is in memory than
the run itself had. A gradient that nobody reads is never computed. Gradients are computed in the
order of the log, several in one program; which of them are together has changed no bit of them
where it was tried, which is small fully connected networks on CPUs (jax 0.10.2).
"""

from collections.abc import Callable, Sequence

from scalejax.config.emulation import EmulationConfig
from scalejax.config.run import ResolvedRun
from scalejax.core.errors import ConfigError
from scalejax.emulation.instructions import Instruction, Value
from scalejax.emulation.progress import Moment
from scalejax.emulation.run import Lines, arithmetic_of
from scalejax.training.record import Measurement


def replay(
    run: ResolvedRun,
    emulation: EmulationConfig,
    instructions: Sequence[Instruction],
    write: Callable[[Measurement], None],
) -> None:
    """Do `instructions` again, as the run that logged them did.

    Args:
        run: what was trained, on one device.
        emulation: how.
        instructions: what was computed, in order.
        write: takes the lines of the record, the same as those of the run.

    Raises:
        ConfigError: if the log is not of such a run, or examples cannot be read.
    """
    arithmetic = arithmetic_of(run, emulation)
    lines = Lines(run, arithmetic, write)
    last_use = {
        number: place
        for place, each in enumerate(instructions)
        for number in (*each.outputs, *each.inputs)
    }
    values: dict[int, Value] = {}
    for place, each in enumerate(instructions):
        if any(number not in values for number in each.inputs):
            raise ConfigError(
                f"the log is damaged: its line {place} reads what no line before has made."
            )
        inputs = tuple(values[number] for number in each.inputs)
        contents = arithmetic.execute(
            each.operation, [value.content for value in inputs], each.factors, each.rows
        )
        if len(contents) != len(each.outputs):
            accepted = f"emulation.server_shards={emulation.server_shards}"
            raise ConfigError(f"the log is of another run: its line {place} is not of {accepted}.")
        for number, content in zip(each.outputs, contents, strict=True):
            values[number] = Value(number, content)
        if each.operation in ("trained", "evaluated"):
            step = int(each.factors[0])
            moment = Moment(at_seconds=each.at_seconds, step=step, metrics=inputs)
            (lines.trained if each.operation == "trained" else lines.evaluated)(moment)
        del inputs, contents
        for number in {*each.inputs, *each.outputs}:
            if last_use[number] == place:
                del values[number]
