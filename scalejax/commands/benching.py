"""The command that measures the input side of a host.

Starts without JAX, and imports it when it runs.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from scalejax import documents, tables, waiting
from scalejax.commands.command import Overrides, RunFileCommand, flag
from scalejax.config import load_config
from scalejax.jax_platform import choose_platform


@dataclass(frozen=True, slots=True, kw_only=True)
class DataBench(RunFileCommand):
    """Measure how fast this host makes batches of a run's data.

    How long row groups take to be read, images of several sizes to be decoded by a worker process
    and by threads, and batches to be handed over: a minute or two. scalejax predict and explain
    take the file with --input-rates, also for images, sizes and numbers of workers that were not
    measured. What changes images at random is left out.
    """

    output: Annotated[Path | None, flag("INPUT.toml")] = None
    """Where the rates go. By default this-machine in the user's cache folder."""

    def execute(self, overrides: Overrides) -> None:
        """Measure, print the stages, write the rates."""
        from scalejax.profile.cache import user_folder

        config = load_config(self.run_file, overrides)
        output = self.output or user_folder() / "this-machine" / "input.toml"
        documents.require_writable("output", output)
        choose_platform()
        from scalejax.input_bench import bench, paces, stage_count
        from scalejax.input_tables import input_side

        with waiting.measuring(stage_count(config.data)) as on_stage:
            rates = bench(config.data, on_stage=on_stage)
        documents.save_toml(rates, output)
        tables.show(input_side(rates, paces(rates, config)))
        print(f"wrote {output}; scalejax predict RUN.toml --input-rates {output} predicts with it.")
