"""Warnings about a resolved run: settings that are valid but often a mistake.

Refuses nothing.
"""

from scalejax.config.model import DecoderConfig
from scalejax.config.run import ResolvedRun


def notes_of(run: ResolvedRun) -> tuple[str, ...]:
    """Warnings about `run` before it begins, as sentences without full stops."""
    notes = (_long_warmup(run), run.config.data.note, _plain_training(run), _unclipped(run))
    return tuple(note for note in notes if note is not None)


def idle_notes(run: ResolvedRun, device_count: int) -> tuple[str, ...]:
    """A warning if the layout of `run` uses fewer devices than the `device_count` available."""
    used = run.layout.device_count
    if used >= device_count:
        return ()
    return (f"the layout uses {used} of {device_count} devices; the others stay idle",)


def _long_warmup(run: ResolvedRun) -> str | None:
    epochs = run.config.train.epochs
    _, warmup = run.config.schedule.scaled(run.split.global_batch)
    if warmup <= epochs:
        return None
    return (
        f"the warmup of {warmup:g} epochs is longer than the run of {epochs}: the learning rate "
        "never reaches its peak"
    )


def _plain_training(run: ResolvedRun) -> str | None:
    if run.config.emulation is None:
        return None
    return "[emulation] is for scalejax emulate and sweep alone, and is ignored here"


def _unclipped(run: ResolvedRun) -> str | None:
    """Only for decoders: image networks are published without clipping, and converge."""
    config = run.config
    is_clipped = (
        config.clipping is not None or getattr(config.optimizer, "variant", None) == "nvlamb"
    )
    if is_clipped or not isinstance(config.model, DecoderConfig):
        return None
    return (
        "gradients are not clipped, which other trainers of decoders do by default (Megatron-LM, "
        "MaxText, torchtitan): [clipping] with max_norm = 1.0 does"
    )
