"""Substitutes for runs that cannot be compiled as they are, and restoration of their programs.

Knows which features a chip lacks; compiles nothing.
"""

from dataclasses import replace

from scalejax.config.model import DecoderConfig, ModelConfig
from scalejax.config.run import ResolvedRun
from scalejax.core.errors import ConfigError, refusal
from scalejax.hardware import Chip
from scalejax.simulator.program import Program
from scalejax.simulator.transforms.float8 import in_float8
from scalejax.xla.target import OLDEST_CAPABILITY


def for_chip(run: ResolvedRun, chip: Chip) -> ResolvedRun:
    """The run that is compiled as a substitute for `run` on `chip`.

    With unfused attention for older chips, which are compiled for as newer ones; in bfloat16 for
    float8, whose products `restored` derives.

    Raises:
        ConfigError: if fused attention or fp8 is requested and the chip has none.
    """
    model = run.config.model
    require_type(model, chip)
    if not isinstance(model, DecoderConfig):
        return run
    compiled = model
    if model.compute_dtype == "float8":
        compiled = replace(compiled, compute_dtype="bfloat16")
    is_old = chip.cuda is not None and chip.cuda.compute_capability < OLDEST_CAPABILITY
    if is_old and model.attention == "fused":
        accepted = f'{chip.name} is older than fused attention; use "auto" or "unfused"'
        raise ConfigError(refusal("model.attention", model.attention, accepted))
    if is_old:
        compiled = replace(compiled, attention="unfused")
    return run if compiled == model else replace(run, config=replace(run.config, model=compiled))


def require_type(model: ModelConfig, chip: Chip) -> None:
    """Refuse float8 on a chip that has no rate for it.

    Raises:
        ConfigError: naming the nearest available type.
    """
    if model.compute_dtype == "float8" and "fp8" not in chip.peak_flop_per_second:
        accepted = f'{chip.name} has no rate for fp8; use "bfloat16", or a chip with one'
        raise ConfigError(refusal("model.compute_dtype", model.compute_dtype, accepted))


def restored(program: Program, run: ResolvedRun) -> Program:
    """Program of `run`, derived from `program`, that of its substitute by `for_chip`."""
    return in_float8(program) if run.config.model.compute_dtype == "float8" else program
