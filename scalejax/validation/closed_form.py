"""Programs of rows by the closed form of the step, in milliseconds and without a compiler.

Where the closed form does not know a run, its program is found as for other validations.
"""

from collections.abc import Sequence

from scalejax.core.errors import ConfigError, ScalejaxError, refusal
from scalejax.planning.search.costs import workspace_bytes
from scalejax.planning.search.run import shape_of, strategy_of
from scalejax.simulator.program import Program
from scalejax.simulator.transformer import transformer_program
from scalejax.xla import ProfileJob
from scalejax.xla.batch import Programs


class ClosedFormPrograms(Programs):
    """Programs of many runs, by the closed form where it knows them."""

    def find(self, jobs: Sequence[ProfileJob]) -> list[Program | ScalejaxError]:
        """Program of each job, or the reason why there is none."""
        answers: dict[int, Program | ScalejaxError] = {}
        for index, job in enumerate(jobs):
            try:
                answers[index] = closed_form(job)
            except ScalejaxError:
                continue
        others = [index for index in range(len(jobs)) if index not in answers]
        found = super().find([jobs[index] for index in others])
        answers.update(zip(others, found, strict=True))
        return [answers[index] for index in range(len(jobs))]


def closed_form(job: ProfileJob) -> Program:
    """The step of a job in closed form, as its framework runs it.

    Raises:
        ConfigError: if the closed form does not know the network or the layout, or what the
            framework differs in needs more than one program.
    """
    job.cluster.require_devices(job.run.layout.device_count)
    if job.framework.vocabulary_factors:
        accepted = "what it differs in is read off compiled programs of several vocabularies"
        raise ConfigError(refusal("framework", job.framework.name, accepted))
    config, chip = job.run.config, job.cluster.chip
    schedule = config.layout.pipeline_schedule
    if job.run.layout.pipeline > 1 and "gpipe" == schedule == job.framework.schedule:
        accepted = "the closed form knows pipelines in 1F1B"
        raise ConfigError(refusal("layout.pipeline_schedule", schedule, accepted))
    program = transformer_program(
        shape_of(config, chip, job.run.dataset),
        strategy_of(job.run),
        workspace_bytes=workspace_bytes(chip),
    )
    return job.framework.applied(program, job.run)
