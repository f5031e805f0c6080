"""Load of the fullest device when tokens choose experts unevenly, and the step on that device.

A step ends when its fullest device does, so a step with experts takes as long as a device with more
rows than the mean. How many more follows from an assumed distribution of expert loads: balanced, or
a power law. Depends on programs and sites, not on clusters.

Left out: memory, which the fullest device also needs more of; that loads change from layer to
layer, so that each may have another fullest device (without a wait between layers a step is then
faster); and element-wise work on the rows, which is not distinguished from other work.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from functools import cache

import numpy as np

from scalejax.config.parallelism import EXPERT
from scalejax.core.errors import ConfigError, refusal, require_above, require_at_least
from scalejax.hardware import Site
from scalejax.simulator.program import Loop, Operation, Program, each_changed

EVEN_LOADS = "each expert has as many tokens as any other; room is for all that may come"
"""Note on the step of a network with experts that drops no tokens."""
_MOST_OVER_LEAST = 0.8 * 4096
"""Load of the fullest expert over that of the emptiest, in the population that loads are drawn
from. Source: NVIDIA AIConfigurator, collector/helper.py, sample_power_law: loads from 1 to 0.8 of
the tokens, here 4096."""
_DRAWS = 512
_SEED = 0


@cache
def device_load_factor(
    exponent: float | None, *, experts: int, devices: int, experts_per_token: int = 1
) -> float:
    """Rows of the fullest device over the mean of all, expected for random placement of experts.

    Loads of experts are independent draws from a density proportional to load^-exponent, and no
    expert gets more than all tokens. With as many devices as experts the factor is that of the
    fullest expert; with one device it is 1. Computed as the mean of 512 seeded draws: accurate to
    about 2 %.

    Args:
        exponent: of the power law; None if loads are balanced. AIConfigurator uses 1.01 for
            DeepSeek-V3 and 1.2 for Qwen3-235B at inference.
        experts: routed experts.
        devices: devices that share the experts in equal blocks.
        experts_per_token: experts that a token goes to.

    Raises:
        ConfigError: if the devices do not divide the experts, or a number is out of range.
    """
    require_at_least("experts", experts, 1)
    require_at_least("devices", devices, 1)
    require_at_least("experts_per_token", experts_per_token, 1)
    if experts % devices or experts_per_token > experts:
        accepted = f"devices={devices} must divide them, and a token choose distinct ones"
        raise ConfigError(refusal("experts", experts, accepted))
    if exponent is None or devices == 1:
        return 1.0
    require_above("exponent", exponent, 0)
    uniform = np.random.default_rng(_SEED).random((_DRAWS, experts))
    if math.isclose(exponent, 1.0):
        loads = _MOST_OVER_LEAST**uniform
    else:
        power = 1 - exponent
        loads = (1 + (_MOST_OVER_LEAST**power - 1) * uniform) ** (1 / power)
    shares = loads / loads.sum(axis=1, keepdims=True)
    most = 1 / experts_per_token  # share of all assignments: every token once
    for _ in range(experts_per_token):  # each pass fills at least one expert
        over = shares > most
        free = 1 - np.where(over, most, 0.0).sum(axis=1, keepdims=True)
        rest = np.where(over | (shares == most), 0.0, shares)
        kept = np.where(shares == most, most, 0.0).sum(axis=1, keepdims=True)
        scale = (free - kept) / np.maximum(rest.sum(axis=1, keepdims=True), 1e-300)
        shares = np.where(over | (shares == most), most, shares * scale)
    per_device = shares.reshape(_DRAWS, devices, experts // devices).sum(axis=2)
    return float(per_device.max(axis=1).mean() * devices)


_PROGRAMS_KEPT = 8
_loaded: deque[tuple[Program, float, Program]] = deque(maxlen=_PROGRAMS_KEPT)


def of_fullest_device(program: Program, site: Site) -> tuple[Program, Site]:
    """`program` as its fullest device runs it, and the site without that condition.

    Both are returned unchanged if the conditions of the site state no imbalance. Otherwise grouped
    products get the rows of the fullest device, loops over blocks of rows get its blocks, and
    all-to-alls of tokens its bytes.
    """
    exponent = site.conditions.expert_load_exponent
    if exponent is None:
        return program, site
    site = replace(site, conditions=replace(site.conditions, expert_load_exponent=None))
    for known, its_exponent, loaded in tuple(_loaded):  # the same object is prepared only once
        if known is program and its_exponent == exponent:
            return loaded, site
    loaded = with_expert_load(program, exponent)
    _loaded.append((program, exponent, loaded))
    return loaded, site


def with_expert_load(program: Program, exponent: float) -> Program:
    """`program` with the rows of its fullest device, for expert loads with that exponent."""
    devices = dict(program.mesh_axes).get(EXPERT, 1)
    routed = {
        item.collective
        for item, _ in program.walk()
        if item.collective is not None and item.collective.tokens is not None
    }
    # If experts are spread over the tensor axis too, devices of both axes count.
    devices = max((each.group.size for each in routed), default=devices)
    tokens = [each.tokens for each in routed if each.tokens is not None]
    grouped_per_token = max((each.experts_per_token for each in tokens), default=1)
    is_padded = any(each.has_capacity for each in tokens)

    def factor(experts: int, per_token: int) -> float:
        return device_load_factor(
            exponent,
            experts=experts,
            devices=devices,
            experts_per_token=min(per_token, experts),
        )

    def loaded(item: Operation) -> Operation:
        if item.grouped_pass is not None and item.shape and not is_padded:
            return _with_rows(item, factor(item.shape[0] * devices, grouped_per_token))
        collective = item.collective
        if collective is None or collective.tokens is None or collective.tokens.has_capacity:
            return item
        times = factor(collective.tokens.experts, collective.tokens.experts_per_token)
        return replace(
            item,
            collective=replace(
                collective,
                payload_bytes=round(collective.payload_bytes * times),
                tokens=replace(collective.tokens, tokens=round(collective.tokens.tokens * times)),
            ),
        )

    def of_blocks(items: Iterable[Operation | Loop]) -> tuple[Operation | Loop, ...]:
        made: list[Operation | Loop] = []
        for item in items:
            if not isinstance(item, Loop):
                made.append(item)
            elif (blocks := item.expert_blocks) is None:
                made.append(replace(item, body=of_blocks(item.body)))
            else:
                times = factor(blocks.experts * devices, blocks.experts_per_token)
                made.append(replace(item, trip_count=math.ceil(item.trip_count * times)))
        return tuple(made)

    operations = of_blocks(each_changed(program.operations, loaded))
    if operations == program.operations:
        return program
    note = (
        f"tokens choose experts by a power law of exponent {exponent:g}: the step is that of the "
        "fullest device"
    )
    kept = tuple(each for each in program.notes if each != EVEN_LOADS)
    if kept != program.notes:
        note += "; room is for all that may come"
    return replace(program, operations=operations, notes=(*kept, note))


def _with_rows(item: Operation, times: float) -> Operation:
    """A grouped product with `times` as many rows; the matrices are unchanged."""
    groups, rows, outer, inner = item.shape
    in_rows = rows * (outer + inner)
    share = in_rows / (in_rows + outer * inner)  # of the elements that are moved
    grown = 1 + (times - 1) * share
    return replace(
        item,
        shape=(groups, math.ceil(rows * times), outer, inner),
        flop=round(item.flop * times),
        read_bytes=round(item.read_bytes * grown),
        write_bytes=round(item.write_bytes * grown),
    )
