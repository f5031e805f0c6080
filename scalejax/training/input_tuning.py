"""Input workers of a run on this host: their number, measured if the config says "auto".

Knows runs, their programs and their folders; `data` loads the batches.
"""

from dataclasses import replace

from scalejax.config.input import InputConfig
from scalejax.config.run import ResolvedRun
from scalejax.data.datasets import open_source
from scalejax.data.loader.loader import chosen_workers
from scalejax.data.source import Shared, Source
from scalejax.training.record import RunFolder
from scalejax.training.reporter import Reporter
from scalejax.training.run_folder import kept_prediction
from scalejax.training.step import Step


def tuned_input(
    run: ResolvedRun, step: Step, files: RunFolder, reporter: Reporter
) -> tuple[ResolvedRun, str]:
    """`run` with a fixed number of `input.workers`, and the reason for it in words.

    Args:
        run: the run that trains.
        step: its first training step.
        files: folder of the run, with its prediction if there is one.
        reporter: where progress is reported.

    Raises:
        UnreadableExample: if an example cannot be read or decoded.
        ConfigError: if a file cannot be read.
    """
    config = run.config
    if config.input.workers != "auto":
        return run, ""
    reporter.say("measuring the input ...")
    prediction = kept_prediction(files)
    choice = chosen_workers(
        open_source(config.data, "train", seed=config.seed, augmentation=config.input.augmentation),
        step.batch,
        seed=config.seed,
        how=config.input,
        step_seconds=prediction and prediction.step_seconds,
    )
    how = replace(config.input, workers=choice.workers)
    return replace(run, config=replace(config, input=how)), f"; {choice}"


def share_memory_with_workers(source: Source, how: InputConfig) -> Source:
    """`source` limited to this process's share of the memory, as the input workers have theirs.

    Raises:
        ConfigError: if the memory is too small for so many workers.
    """
    if isinstance(how.workers, int) and how.workers and isinstance(source, Shared):
        return source.share_of(how.workers + 1)
    return source
