"""Memory advice: how much memory a step lacks, and settings of the run that would reduce it.

Knows the fields of a run that memory depends on; not how much each of them saves.
"""

from scalejax.config.run import ResolvedRun
from scalejax.core.units import GIB


def memory_notes(run: ResolvedRun, *, needed_bytes: int, memory_bytes: int) -> str | None:
    """Note on a step that does not fit into the memory of a device; None if it fits.

    Args:
        run: the run, on its devices.
        needed_bytes: peak memory of one device.
        memory_bytes: memory of one device.
    """
    if needed_bytes <= memory_bytes:
        return None
    needs = f"{needed_bytes / GIB:.1f} of {memory_bytes / GIB:.1f} GiB on each device"
    *others, last = _remedies(run) or ["a smaller network"]
    remedies = f"{', '.join(others)} or {last}" if others else last
    return f"does not fit: needs {needs}; {remedies} would need less"


def _remedies(run: ResolvedRun) -> list[str]:
    """Applicable changes to the run that reduce the memory of its devices."""
    split, layout = run.split, run.layout
    layers = getattr(run.config.model, "layers", layout.pipeline)
    is_open = {
        # If the stages divide neither the layers nor any other dimension of a parameter, every
        # stage holds all of it.
        f"layout.pipeline that divides {layers} layers": layers % layout.pipeline > 0,
        "fewer samples per device": split.per_device_batch > 1,
        "fsdp": run.config.layout.mode == "jit" and layout.data > 1,
        "layout.zero_stage=1": run.config.layout.mode == "jit"
        and layout.data > 1
        and not run.config.layout.zero_stage,
        "microbatches": split.microbatch > 1,
        "remat": getattr(run.config.model, "remat", "full") != "full",
    }
    return [name for name, applies in is_open.items() if applies]
