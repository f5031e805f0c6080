"""What a compiled step does not say about its experts: how many tokens are sent, and how.

Depends on the run and its program, not on hardware.
"""

from dataclasses import replace

from scalejax.config.model import LlamaConfig
from scalejax.config.parallelism import EXPERT
from scalejax.config.run import ResolvedRun
from scalejax.simulator.program import Operation, Program, RoutedTokens, each_changed


def routed_tokens(run: ResolvedRun) -> RoutedTokens | None:
    """Tokens of a microbatch on one device and their routing; None for networks without experts.

    Groups of experts, of which a token may choose only some, are assumed to match nodes, as in
    DeepSeek-V3 (arXiv 2412.19437, section 2.1.2).
    """
    model = run.config.model
    moe = model.moe if isinstance(model, LlamaConfig) else None
    if moe is None:
        return None
    return RoutedTokens(
        tokens=run.split.microbatch * run.dataset.input_shape[0] // run.layout.context,
        experts_per_token=moe.experts_per_token,
        experts=moe.experts,
        most_nodes=moe.router.groups_per_token if moe.router.groups > 1 else None,
        has_capacity=moe.capacity_factor is not None,
    )


def with_routed_tokens(program: Program, run: ResolvedRun) -> Program:
    """`program` of `run` in which all-to-alls over the expert axis state which tokens they send."""
    tokens = routed_tokens(run)
    if tokens is None:
        return program

    def said(item: Operation) -> Operation:
        collective = item.collective
        if collective is None or collective.name != "all_to_all":
            return item
        if collective.group.axes != (EXPERT,):
            return item
        return replace(item, collective=replace(collective, tokens=tokens))

    return replace(program, operations=each_changed(program.operations, said))
