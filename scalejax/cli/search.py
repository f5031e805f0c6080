"""The command `search`: ranks the parallelisation strategies of a transformer's step.

Imported without JAX, which is imported when it runs.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional

from scalejax.cli.command import (
    CostCommand,
    CsvFile,
    JsonFile,
    Overrides,
    flag,
    require_result_files,
    say,
    write_result,
)
from scalejax.cli.predict import cluster_list, parse_counts, path_for, take_conditions
from scalejax.config.dataset_facts import DatasetFacts
from scalejax.config.presets import PRESETS, costed_note
from scalejax.config.run import RunConfig, given_name, load_config
from scalejax.core import progress, serialization
from scalejax.core.environment import machine_cores
from scalejax.core.errors import ConfigError, DoesNotFit, refusal, require_at_least
from scalejax.core.units import counted
from scalejax.planning.search import SearchResult
from scalejax.report.terminal import tables
from scalejax.simulator.frameworks import framework_named
from scalejax.simulator.transformer import Strategy
from scalejax.training.record import facts_of

if TYPE_CHECKING:
    from scalejax.planning.search.run import Ranked, SearchReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Search(CostCommand):
    """Rank the parallelisation strategies of a transformer.

    The network is that of RUN.toml, or the published decoder that --model names, as pretrained; if
    its published layout is known, its rank is shown, and why the first is faster.

    Ranks every layout over data, fsdp, expert, tensor, context and pipeline, with pipeline chunks,
    microbatches, remat and ZeRO stages, that fits in memory; the best are compiled to confirm them.
    Layout, microbatches and remat of the file are replaced. A flag with a dot replaces a field of
    the file, of --conditions, or of the hardware (--network.bytes_per_second 2x).
    """

    run_file: Annotated[Positional[Path | None], flag("RUN.toml")] = None  # type: ignore[assignment]  or --model
    """The config of the run, unless --model names a published network."""
    model: Annotated[str | None, flag("NAME")] = None
    """Published decoder, such as deepseek-v3, instead of RUN.toml."""
    cluster: Annotated[str, flag("A,B,...")]
    """Names in the catalogue (see scalejax hardware), or TOML files of your own; each is searched
    separately."""
    devices: Annotated[str, flag("N..M")]
    """Number of devices, or several to choose from: 64, 64,128,256, or 64..256 for doublings."""
    global_batch: Annotated[int | None, flag("B")] = None
    """Samples per update; by default as in the file, or as published (a note says if it is
    assumed)."""
    objective: Literal["time", "cost", "memory"] = "time"
    """What is minimised: step time, device-hours per sample, or memory."""
    price_per_device_hour: Annotated[float | None, flag("PRICE")] = None
    """Price of one device-hour, in any currency: adds the price of a million samples."""
    top: Annotated[int, flag("K")] = 10
    """Number of strategies in the table; with several numbers of devices, equally many of each."""
    confirm: Annotated[int, flag("K")] = 3
    """Number of the best strategies that are compiled to confirm them; with several numbers of
    devices, the first of each, then the second of each."""
    json: JsonFile = None
    """Write the strategies here as JSON."""
    csv: CsvFile = None
    """Write the rows of the table here as CSV, in SI units."""
    output: Annotated[Path | None, flag("DIR")] = None
    """Folder for the strategies, a plot of time against memory, and the run file of the first."""

    def execute(self, overrides: Overrides) -> None:
        """Search each cluster, compile the best strategies, print the table, write the results."""
        require_result_files(self.json, self.csv)
        serialization.require_writable_folder("output", self.output)
        require_at_least("top", self.top, 1)
        require_at_least("confirm", self.confirm, 0)
        require_at_least("price_per_device_hour", self.price_per_device_hour, 0)
        names = cluster_list(self.cluster)
        unfit: list[DoesNotFit] = []
        for place, name in enumerate(names):
            if place:
                print()
            try:
                self._search(name, names, overrides)
            except DoesNotFit as error:
                if len(names) == 1:
                    raise
                unfit.append(error)
                for line in f"{name}: {error}".splitlines():
                    say(line)
        if len(unfit) == len(names):
            raise unfit[0]

    def _search(self, cluster_name: str, names: Sequence[str], overrides: Overrides) -> None:
        """Search one of the clusters."""
        from scalejax.planning.run_cost import published_decoder
        from scalejax.planning.search.run import (
            NOT_VARIED,
            SEARCHED_FIELDS,
            confirm_search,
            left_out_notes,
            report_search,
            search_run,
        )
        from scalejax.report.terminal import search as search_tables
        from scalejax.xla.closed_form import shape_of

        framework = framework_named(self.framework)
        cluster, site, overrides = take_conditions(cluster_name, overrides)
        for name in sorted((SEARCHED_FIELDS.keys() | {"model.remat"}) & overrides.keys()):
            tried = "knows the default alone" if name in NOT_VARIED else "tries every value"
            accepted = f"search {tried}; leave it out, or ask predict for one"
            raise ConfigError(refusal(name, overrides[name], accepted))
        counts = tuple(parse_counts(self.devices))
        # A gradient_sync table keeps its layout, and `shape_of` refuses what it cannot cost.
        if (self.run_file is None) == (self.model is None):
            raise ConfigError("search needs either RUN.toml or --model NAME, and not both.")
        if self.model is not None:
            name, run_file = self.model, Path()
            batch = {} if self.global_batch is None else {"batch.global_batch": self.global_batch}
            config, notes = published_decoder(name, {**SEARCHED_FIELDS, **batch, **overrides})
        else:
            notes = []
            run_file: Path = self.run_file  # type: ignore[assignment]  one of the two is given
            is_given = given_name(run_file, overrides, table="gradient_sync") is not None
            config = load_config(run_file, {**overrides, **({} if is_given else SEARCHED_FIELDS)})
            name = given_name(run_file, overrides)
            layout = serialization.load_toml(run_file).get("layout")
            for each in (field.partition(".")[2] for field in NOT_VARIED):
                if isinstance(layout, dict) and layout.get(each):
                    say(f"note: layout.{each} is left out of the search.", sys.stderr)
        facts = facts_of(config, run_file, overrides, self.facts)
        costed = costed_note(name, config.model, facts)
        with progress.searching() as on_progress:
            found = search_run(
                config,
                cluster,
                counts,
                site=site,
                global_batch=self.global_batch,
                objective=self.objective,
                processes=machine_cores(),
                facts=facts,
                on_progress=on_progress,
            )
        if not found.ranked:
            left_out = left_out_notes(shape_of(config, cluster.chip, facts), counts)
            raise DoesNotFit(self._nothing_fits(found.nearest, cluster.title, left_out))
        report = report_search(
            config,
            cluster,
            found,
            site=site,
            objective=self.objective,
            framework=framework,
            price_per_device_hour=self.price_per_device_hour,
            top=self.top,
            notes=(*((costed,) if costed else ()), *notes),
            facts=facts,
            preset=name if name in PRESETS else None,
        )
        tables.show(search_tables.searched(report))
        if self.confirm:
            with progress.compiling(min(self.confirm, len(report.ranked))) as on_progress:
                report = confirm_search(
                    report,
                    config,
                    cluster,
                    confirm=self.confirm,
                    site=site,
                    framework=framework,
                    facts=facts,
                    on_progress=on_progress,
                )
        print()
        tables.show(search_tables.confirmed(report, has_run_file=self.model is None))
        output = self.output
        if output is not None and len(names) > 1:
            output = output / Path(cluster_name).stem
        write_result(
            report,
            path_for(self.json, cluster_name, names),
            path_for(self.csv, cluster_name, names),
        )
        if output is not None:
            self._write(report, found, output)
        if (first := search_tables.winner(report)) is not None:
            self._show_run(config, first, facts, cluster_name, output)

    def _write(self, report: "SearchReport", found: SearchResult, output: Path) -> None:
        """Write the results and the plot into a folder."""
        from scalejax.report.figures import time_and_memory
        from scalejax.report.html.charts import save_picture

        write_result(report, output / "search.json", None)
        plot = output / "time_and_memory.png"
        save_picture(time_and_memory(found.ranked, title=report.title), plot)
        print(f"wrote {plot}")

    def _show_run(
        self,
        config: RunConfig,
        first: "Ranked",
        facts: DatasetFacts,
        cluster: str,
        output: Path | None,
    ) -> None:
        """Write the run file of the first strategy if there is a folder for it, and say how to
        train and predict it, or how to get a run file if the network has none."""
        from scalejax.planning.search.run import run_of

        if output is not None:
            path = output / "run.toml"
            serialization.save_toml(run_of(config, first.strategy, facts).config, path)
            print(f"wrote {path}, the run of {first.place}:")
            print(f"  scalejax train {path}")
            devices = first.strategy.layout.device_count
            print(f"  scalejax predict {path} --cluster {cluster} --devices {devices}")
        elif self.model is not None:
            print(
                f"With --output DIR, the run file of {first.place} is written too, DIR/run.toml:\n"
                "scalejax train and predict take it."
            )

    def _nothing_fits(
        self, nearest: tuple[Strategy, float] | None, title: str, notes: tuple[str, ...]
    ) -> str:
        """The message if no strategy fits: the nearest one, and what was not searched."""
        from scalejax.planning.search.run import in_words

        devices = counted(self.devices, "device")
        if nearest is None:
            answer = f"no strategy divides network and samples evenly over {devices}."
        else:
            strategy, ratio = nearest
            answer = (
                f"no strategy fits {devices} of {title}; "
                f"the nearest needs {ratio:.2g}x the memory: {in_words(strategy)}."
            )
        return "\n".join((answer, *(f"{note}." for note in notes)))
