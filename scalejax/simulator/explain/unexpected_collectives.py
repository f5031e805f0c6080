"""Collectives that the layout does not call for (unintended resharding), and their cost.

Each axis of a layout implies collectives: gradients are summed over data; parameters are gathered
and gradients scattered over fsdp; tokens go to their experts and back over expert; activations are
summed over tensor; keys are gathered over context; stages of a pipeline pass activations on, and
share the embedding and the output layer. With ZeRO, gradients are scattered over data and
parameters gathered. Any other collective that the compiler inserted moves an array from one
sharding to another, mostly because a dimension does not divide or two annotations disagree.
User-defined axes have no rules.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass

from scalejax.config.parallelism import AXES, CONTEXT, DATA, EXPERT, FSDP, PIPELINE, TENSOR
from scalejax.simulator.program import HOST_MEMORY, Collective, CollectiveName, Program
from scalejax.simulator.timeline.attribution import Attribution

LEAST_SHARE = 1e-3
"""Fraction of a step below which a collective is not reported: scalars and indices."""

_CALLED_FOR: dict[str, frozenset[CollectiveName]] = {
    PIPELINE: frozenset({"all_reduce", "all_gather", "reduce_scatter", "collective_permute"}),
    DATA: frozenset({"all_reduce"}),
    FSDP: frozenset({"all_reduce", "all_gather", "reduce_scatter"}),
    EXPERT: frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}),
    CONTEXT: frozenset({"all_reduce", "all_gather", "reduce_scatter"}),
    TENSOR: frozenset({"all_reduce"}),
}
"""Collectives that each axis of a layout implies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnexpectedCollective:
    """A collective that the layout does not call for."""

    name: str
    """The compiler's name for the collective."""
    collective: CollectiveName
    """Kind of collective."""
    axes: tuple[str, ...]
    """Mesh axes that it spans; () if its group is not a product of axes."""
    payload_bytes: int
    """Payload of one run."""
    runs: int
    """Runs per step."""
    seconds: float
    """Time of all its runs, whether or not they are overlapped."""
    step_seconds: float
    """Exposed time that it adds to the step."""
    reason: str
    """Reason why it is unexpected."""
    source: str | None
    """Place in the user's program that it comes from."""


def unexpected_collectives(
    program: Program, attributions: Sequence[Attribution], step_seconds: float
) -> tuple[UnexpectedCollective, ...]:
    """Collectives of `program` that its layout does not call for, the costliest first.

    Args:
        program: the compiled step.
        attributions: step time attributed to each of its operations.
        step_seconds: time of the step; collectives below `LEAST_SHARE` of it are left out.
    """
    scattered = {
        attribution.operation.collective.group.axes
        for attribution in attributions
        if attribution.operation.collective is not None
        and attribution.operation.collective.name == "reduce_scatter"
    }
    found = []
    for attribution in attributions:
        collective = attribution.operation.collective
        if collective is None or attribution.seconds < LEAST_SHARE * step_seconds:
            continue
        reason = _reason(collective, program, scattered)
        if reason is not None:
            found.append(
                UnexpectedCollective(
                    name=attribution.operation.name,
                    collective=collective.name,
                    axes=collective.group.axes,
                    payload_bytes=collective.payload_bytes,
                    runs=attribution.runs,
                    seconds=attribution.seconds,
                    step_seconds=attribution.step_seconds,
                    reason=reason,
                    source=attribution.operation.source,
                )
            )
    return tuple(sorted(found, key=lambda each: (-each.step_seconds, -each.seconds)))


def _reason(
    collective: Collective, program: Program, scattered: Set[tuple[str, ...]]
) -> str | None:
    """Reason why the layout does not call for a collective; None if it does, or has no rules.

    Args:
        collective: the collective.
        program: the program that contains it.
        scattered: axes along which the program scatters sums, and so may gather again.
    """
    known = {name for name, _ in program.mesh_axes} <= set(AXES)
    if not known or collective.group == HOST_MEMORY:
        return None
    axes = collective.group.axes
    stages = dict(program.mesh_axes).get(PIPELINE, 1)
    if collective.name == "collective_permute" and stages > 1 and axes in ((PIPELINE,), ()):
        return None  # the last stage's neighbour is the first: these two are not a whole axis
    if not axes:
        return "its devices are no axis of the mesh: an array changes its sharding"
    if collective.name == "all_to_all" and axes == (PIPELINE,):
        return "blocks are redistributed that equal stages of one chunk would hold already"
    if collective.name == "all_to_all" and axes == (EXPERT,):
        return None
    if collective.name == "all_to_all":
        return "no axis calls for one: an array changes its sharding"
    if collective.name == "collective_permute":
        return "no axis calls for one: shards move to their neighbours"
    is_of_zero = axes[0] == DATA and {DATA, EXPERT, CONTEXT}.issuperset(axes)
    if collective.name == "all_gather" and is_of_zero and any(DATA in each for each in scattered):
        return None
    if collective.name == "all_gather" and DATA in axes:
        return "parameters are whole along data: an activation or the batch is gathered"
    if collective.name == "all_gather" and axes == (TENSOR,):
        # Sequence parallelism scatters the sums that it gathers again.
        return None if axes in scattered else "an activation is gathered that could stay sharded"
    if all(collective.name in _CALLED_FOR[axis] for axis in axes):
        return None
    if collective.name == "reduce_scatter":  # from sequence parallelism, or over data and fsdp
        return None
    return f"the layout of {' x '.join(axes)} calls for none"
