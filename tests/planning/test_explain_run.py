"""What recompute and offload save, as far as a run may have them and the compiler takes them."""

from dataclasses import replace

import pytest
from hardware_cases import cluster_of
from program_cases import NO_MEMORY, matmul, program_of
from test_memory_advice import TEXT, run_on

from scalejax.core.errors import ProfileError
from scalejax.core.progress import OnProgress
from scalejax.planning import explain_run as planning
from scalejax.planning.explain_run import ExplainedRun, with_memory_choices
from scalejax.simulator.explain import explain
from scalejax.simulator.program import Program
from scalejax.xla import ProfileJob

HELD = {"none": 5, "selective": 4, "selective_op": 3, "full": 1}


def step(gigabytes: int, milliseconds: float = 1.0) -> Program:
    """A step of so much time and memory."""
    memory = replace(NO_MEMORY, argument_bytes=gigabytes * 10**9)
    return replace(program_of(matmul("m", milliseconds)), memory=memory)


def compiled(jobs: list[ProfileJob], _: OnProgress) -> list[Program]:
    """Refuses "minimal_offloaded", and with it all that are asked for together."""
    models = [job.run.config.model for job in jobs]
    remats = [getattr(model, "remat", "none") for model in models]
    if "minimal_offloaded" in remats:
        raise ProfileError("the compiler aborts.")
    return [step(HELD[name], milliseconds=6 - HELD[name]) for name in remats]


def test_each_recompute_that_compiles_is_shown_by_rising_memory(monkeypatch: pytest.MonkeyPatch):
    """Momentum is offloaded at no cost here; of a program that aborts nothing is shown."""
    config = run_on(8, {**TEXT, "model.remat": "selective"}).config
    own, cluster = step(4, milliseconds=2), cluster_of()
    before = ExplainedRun(explanation=explain(own, cluster), program=own, shortage=None)
    monkeypatch.setattr(planning, "profile_many", compiled)

    found = with_memory_choices(before, config, cluster).explanation.memory_choices

    reserve = cluster.chip.runtime_reserve_bytes
    held = {each.change: (each.peak_memory_bytes - reserve) // 10**9 for each in found}
    assert list(held.values()) == [1, 3, 4, 4, 5]
    assert held["as it is"] == held["layout.optimizer_memory_host_offload = true"] == 4
    assert {
        f'model.remat = "{name}"': HELD[name] for name in ("full", "none")
    }.items() <= held.items()
    assert found[0].step_seconds > found[-1].step_seconds
