"""What may well be meant in a run and often is not: said, and not refused.

Knows runs as they are resolved, and what was predicted of them; needs no JAX.
"""

from scalejax.config.run import ResolvedRun
from scalejax.config.scaling_rules import warmup_epochs
from scalejax.data.formats.tokens import TokensConfig
from scalejax.simulator.predict import Prediction

FAR_OFF = 3
"""How many times the predicted a measured step may take before it is said what that tells: runs on
a quiet machine were at most 61 % off (`experiments/local_prediction`)."""


def notes_of(run: ResolvedRun) -> tuple[str, ...]:
    """What a reader should know of `run` before it begins: sentences without full stops."""
    notes = (_long_warmup(run), _whole_files(run), _plain_training(run))
    return tuple(note for note in notes if note is not None)


def idle_notes(run: ResolvedRun, device_count: int) -> tuple[str, ...]:
    """What to say of devices, of `device_count` there are, that the layout of `run` leaves idle."""
    used = run.layout.device_count
    if used >= device_count:
        return ()
    return (f"the layout takes {used} of {device_count} devices; the others stay idle",)


def _long_warmup(run: ResolvedRun) -> str | None:
    epochs = run.config.train.epochs
    warmup = warmup_epochs(run.config.schedule, run.split.global_batch)
    if warmup <= epochs:
        return None
    return (
        f"the warmup of {warmup:g} epochs is longer than the run of {epochs}: the learning rate "
        "never gets to its peak"
    )


def _whole_files(run: ResolvedRun) -> str | None:
    data = run.config.data
    if not isinstance(data, TokensConfig) or data.packing != "documents":
        return None
    if data.end_of_document is not None:
        return None
    return (
        'data.packing = "documents" without data.end_of_document takes each file for one document'
    )


def _plain_training(run: ResolvedRun) -> str | None:
    if run.config.emulation is None:
        return None
    return "[emulation] is for scalejax emulate and sweep alone, and is not looked at here"


def slow_note(prediction: Prediction, measured_seconds: float) -> str | None:
    """What to think of a step that takes far longer than was predicted; None if it does not."""
    times = measured_seconds / prediction.step_seconds
    if times <= FAR_OFF:
        return None
    why = "other work on this machine, what the host needs to start a step, or a wrong prediction"
    if prediction.backend == "cpu" and prediction.device_count > 1:
        why = (
            "virtual devices share the cores of one machine, with its other work and with what "
            "starts each step: they show that a run is right, not how fast it is"
        )
    return f"{times:.0f} times the predicted step: {why}"
