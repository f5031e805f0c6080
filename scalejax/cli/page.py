"""The command `page`: one interactive HTML file of a decoder's time, cost and memory.

Imported without JAX: separate processes compile.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional

from scalejax.cli.command import (
    CsvFile,
    JsonFile,
    Overrides,
    OverridingCommand,
    flag,
    require_result_files,
    say,
    write_result,
)
from scalejax.cli.plan import for_each
from scalejax.cli.predict import cluster_list, parse_counts, take_clusters
from scalejax.config.model import DecoderConfig, LlamaConfig
from scalejax.config.presets import PRESETS
from scalejax.config.run import RunConfig, given_name, load_config, with_fields
from scalejax.core import progress, serialization
from scalejax.core.environment import machine_cores
from scalejax.core.errors import ConfigError, refusal, require_at_least, require_at_most
from scalejax.core.units import parse_count
from scalejax.data.facts import fitting_facts
from scalejax.hardware import Cluster
from scalejax.simulator.frameworks import framework_named

_MOST_BYTES = 3_000_000
_MOST_TOKENS = 1e18
"""Limit of the field of the page (explorer.js)."""
_TOKENS_FOR_A_PARAMETER = 20
"""Hoffmann et al. 2022, arXiv 2203.15556, table 3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explore(OverridingCommand):
    """Write an interactive page: days, dollars and memory.

    For RUN.toml, or a published decoder by name (llama3-8b): sliders and menus for devices, batch,
    tokens, layout, precision, network and framework, in one HTML file that works offline and keeps
    its setting in its address. Every step on it is what predict prints, or marked as a closed form.
    XLA's is compiled for each cluster, number of devices, batch and precision: 36 times or more for
    two clusters and one precision, 10 to 30 s of a core each; compiled programs are cached. A flag
    with a dot replaces a field of the file, a condition of the clusters or a part of their
    hardware.
    """

    run: Annotated[Positional[str], flag("MODEL or RUN.toml")]
    """A published decoder by name, or the config of a run of gpt or llama."""
    cluster: Annotated[str, flag("A,B,...")]
    """Clusters to compare: names in the catalogue, or TOML files of your own."""
    output: Annotated[Path, flag("PAGE.html")]
    """The file."""
    devices: Annotated[str, flag("N..M")] = "64..2048"
    """Numbers of devices: 64..2048 for every doubling, or 64,256,1000."""
    batches: Annotated[str | None, flag("B,B,...")] = None
    """Samples per update. By default that of the run or as published (a note says if it is
    assumed), half of it and twice."""
    tokens: Annotated[str | None, flag("TOKENS")] = None
    """Tokens to begin with, such as 300B or 15T. By default the epochs of the run, or as published,
    or 20 for each parameter."""
    precisions: Annotated[str | None, flag("TYPE,...")] = None
    """Types of products. By default that of the run, and float8 if a chip has it."""
    networks: Annotated[str, flag("X,X,...")] = "0.5,1,2"
    """Rates of the network between nodes, over the cluster's own."""
    frameworks: Annotated[str | None, flag("NAME,...")] = None
    """Frameworks that train it (see scalejax hardware). By default xla, and Megatron-Core on GPUs
    or MaxText elsewhere."""
    layouts: Annotated[int, flag("K")] = 8
    """Maximum number of layouts of a setting."""
    confirm: Annotated[int, flag("K")] = 1
    """Layouts of a setting that are compiled, if the framework has no kernels of its own, and more
    until one fits; others are marked as closed forms. With 0 none are, and a page takes a minute or
    two."""
    price: Annotated[str | None, flag("P,P,...")] = None
    """Your prices of a device-hour, one for each cluster. By default the list prices."""
    grid_intensity: Annotated[float | None, flag("GRAMS_PER_KWH")] = None
    """Grams of CO2 per kWh of electricity."""
    json: JsonFile = None
    """Write the layouts of every setting here as JSON (scalejax schema)."""
    csv: CsvFile = None
    """Write them here as CSV, in SI units."""

    def execute(self, overrides: Overrides) -> None:
        """Predict every setting, and write the page."""
        from scalejax.planning.bill import rates_of
        from scalejax.planning.settings_grid import Axes, Place, settings_grid
        from scalejax.report.html.explorer import Subject, title_of, write_explorer
        from scalejax.report.listings import page_contents

        serialization.require_writable("output", self.output)
        require_result_files(self.json, self.csv)
        names = cluster_list(self.cluster)
        found, rest, left_out = take_clusters(names, overrides)
        for note in left_out:
            say(f"note: {note}.", sys.stderr)
        places = [Place(cluster=cluster, site=site) for cluster, site in found.values()]
        clusters = [place.cluster for place in places]
        given = zip(names, for_each("price", self.price, len(names)), strict=True)
        prices = [price for name, price in given if name in found]
        rates = tuple(
            rates_of(each, price_per_device_hour=price, grid_grams_per_kwh=self.grid_intensity)
            for each, price in zip(clusters, prices, strict=True)
        )
        config, name = self._config(rest)
        tokens, source = self._tokens(config, name)
        axes = Axes(
            places=tuple(places),
            device_counts=tuple(parse_counts(self.devices)),
            global_batches=self._batches(config),
            compute_dtypes=self._precisions(config, clusters),
            network_multiples=tuple(sorted(_numbers("networks", self.networks))),
            frameworks=self._frameworks(clusters),
        )
        with (
            progress.costing_cases(len(axes.cases)) as on_progress,
            progress.compiling_programs() as on_compiled,
        ):
            grid = settings_grid(
                config,
                axes,
                layouts=self.layouts,
                confirm=self.confirm,
                processes=machine_cores(),
                on_progress=on_progress,
                on_compiled=on_compiled,
            )
        subject = Subject(
            title=title_of(name),
            run=self.run if Path(self.run).exists() else "RUN.toml",
            clusters=tuple(found),
            overrides=overrides,
            tokens=tokens,
            tokens_source=source,
            rates=rates,
            start=grid.start(config.batch.global_batch),
        )
        size = write_explorer(grid, subject, self.output)
        print(f"wrote {self.output}, {size / 1e6:.1f} MB, which any browser opens without network")
        if size > _MOST_BYTES:
            say("Fewer --devices, --batches, --networks, --frameworks or --layouts make it small.")
        write_result(page_contents(grid, str(self.output), size, tokens), self.json, self.csv)

    def _config(self, overrides: Overrides) -> tuple[RunConfig, str]:
        """The run, with the fields that the page varies replaced, and the name of its network."""
        from scalejax.planning.run_cost import published_decoder
        from scalejax.planning.search.run import SEARCHED_FIELDS, require_not_searched

        require_not_searched(overrides, "the page tries every value; leave it out")
        path = Path(self.run)
        if path.exists() or path.suffix == ".toml":
            config = load_config(path, {**overrides, **SEARCHED_FIELDS})
            return config, given_name(path, overrides) or config.model.name
        fields = {**SEARCHED_FIELDS, **overrides}
        if self.batches is not None and "batch.global_batch" not in fields:
            given = parse_counts(self.batches, "batches")
            fields["batch.global_batch"] = given[len(given) // 2]
        config, notes = published_decoder(self.run, fields)
        for note in notes:
            say(f"note: {note}.".replace("--global-batch", "--batches"), sys.stderr)
        return config, self.run

    def _batches(self, config: RunConfig) -> tuple[int, ...]:
        if self.batches is not None:
            return tuple(parse_counts(self.batches, "batches"))
        if not isinstance(config.model, DecoderConfig):
            accepted = "a page is of gpt and llama, in closed form; use scalejax predict"
            raise ConfigError(refusal("model.name", config.model.name, accepted))
        batch = config.batch.global_batch
        if batch is None:
            accepted = "samples per update are needed, as the run gives none of all devices"
            raise ConfigError(refusal("batches", None, accepted))
        return tuple(sorted({max(1, batch // 2), batch, 2 * batch}))

    def _precisions(self, config: RunConfig, clusters: Sequence[Cluster]) -> tuple[str, ...]:
        own = str(config.model.compute_dtype)
        if self.precisions is None:
            has_float8 = any("fp8" in each.chip.peak_flop_per_second for each in clusters)
            found = (
                (own, "float8") if has_float8 and isinstance(config.model, LlamaConfig) else (own,)
            )
        else:
            found = tuple(each.strip() for each in self.precisions.split(","))
        for each in found:
            with_fields(config, {"model.compute_dtype": each})
        return tuple(dict.fromkeys(found))

    def _frameworks(self, clusters: Sequence[Cluster]) -> tuple[str, ...]:
        are_gpus = all(each.chip.tpu is None for each in clusters)
        usual = "xla,megatron-core-2026" if are_gpus else "xla,maxtext-2025"
        names = (self.frameworks or usual).split(",")
        return tuple(dict.fromkeys(framework_named(each.strip()).name for each in names))

    def _tokens(self, config: RunConfig, name: str) -> tuple[float, str]:
        """Tokens that the page starts with, and the source of that number."""
        if self.tokens is not None:
            tokens = parse_count("tokens", self.tokens)
            require_at_least("tokens", tokens, 1)
            require_at_most("tokens", tokens, _MOST_TOKENS)
            return tokens, "as given to the command"
        if (preset := PRESETS.get(name)) is not None and not Path(self.run).exists():
            if preset.pretraining is not None and preset.pretraining.total_tokens is not None:
                return float(preset.pretraining.total_tokens), preset.pretraining.source
            tokens = float(_TOKENS_FOR_A_PARAMETER * preset.parameters)
            source = f"{_TOKENS_FOR_A_PARAMETER} for each of {preset.parameters:,} parameters"
            return tokens, f"{source}, as Hoffmann et al. 2022, arXiv 2203.15556, found best"
        facts = fitting_facts(config, None)
        tokens = float(config.train.epochs * facts.train_examples * facts.input_shape[0])
        return tokens, f"{config.train.epochs} epochs of {facts.train_examples:,} samples"


def _numbers(field: str, text: str) -> tuple[float, ...]:
    try:
        found = tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError as error:
        accepted = "it must be numbers with commas between, such as 0.5,1,2"
        raise ConfigError(refusal(field, text, accepted)) from error
    if not all(0 < each < math.inf for each in found):
        raise ConfigError(refusal(field, text, "each must be above 0, and finite"))
    return found
