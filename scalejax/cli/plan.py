"""The command `plan`: the cluster, number of devices and batch with the least time to target.

The target is a test metric, with measured convergence points, or a final loss of a language model.

Imported without JAX, which is imported when it runs.
"""

import math
import sys
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
from scalejax.cli.predict import cluster_list, parse_counts, take_clusters
from scalejax.config.run import RunConfig, load_config, published_run
from scalejax.core import progress, serialization
from scalejax.core.errors import ConfigError, DoesNotFit, nearest_name, refusal
from scalejax.core.units import parse_seconds
from scalejax.report.terminal import tables
from scalejax.simulator.frameworks import framework_named
from scalejax.training.record import facts_of

if TYPE_CHECKING:
    from scalejax.planning.time_to_target.plan import Plan
    from scalejax.planning.time_to_target.run import ClusterOption

_LOSS = "loss="


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRun(CostCommand):
    """Find the devices and batch that reach a target soonest.

    Time to target is the number of steps that the batch needs, from measured convergence points,
    times the predicted step time. --target loss=L is the final loss of a decoder, whose tokens,
    batch and rate follow from published runs. A flag with a dot replaces a field of the file, or of
    --conditions.
    """

    run_file: Annotated[Positional[Path | None], flag("RUN.toml")] = None  # type: ignore[assignment]  or --model
    """The config of the run, unless --model names a decoder."""
    model: Annotated[str | None, flag("NAME")] = None
    """Instead of RUN.toml, for a loss: llama-like:N=1b, or a published decoder (llama3-8b)."""
    cluster: Annotated[str, flag("A,B,...")]
    """Clusters to choose from: names in the catalogue, or TOML files of your own."""
    devices: Annotated[str, flag("N..M")]
    """Numbers of devices to choose from: 8..4096 for every doubling, or 8,64,256."""
    target: Annotated[str | None, flag("VALUE")] = None
    """Test metric to reach, such as 0.759 or 75.9%; by default that of the convergence points. Or
    loss=2.6, nats per token."""
    convergence: Annotated[str | None, flag("FILE|DIR")] = None
    """Steps to target by batch: CSV or Parquet of runs, TOML or JSON of points and optionally a
    noise scale, the folder of a run or sweep with its noise scale, or the name of published points.
    By default those of the network, or else the epochs of the run."""
    recipe: Annotated[str | None, flag("NAME")] = None
    """Published recipe of those points, and of their noise scales; by default, for each batch, that
    of the nearest point."""
    global_batch: Annotated[str | None, flag("B,B,...")] = None
    """Global batches to choose from, such as 1024..8192; by default the batch per device is
    constant."""
    layouts: Literal["search", "file"] = "search"
    """Whether each row has the fastest of the common layouts, for decoders whose closed form is
    known, or that of the file."""
    deadline: Annotated[str | None, flag("TIME")] = None
    """Time within which the target must be reached, such as 30min, 2h or 3d."""
    budget: Annotated[float | None, flag("COST")] = None
    """Largest cost: a number in the currency of --price, such as 500; without --price in dollars of
    list prices, or in device-hours if a cluster has no price."""
    price: Annotated[str | None, flag("PRICE")] = None
    """Price of one device-hour, in any currency; one for all clusters, or P,P,... for each. By
    default the list prices in the clusters' files, in dollars, if all have one."""
    watts: Annotated[str | None, flag("W")] = None
    """Power of a device with its share of host, network and cooling, for the energy to a loss; one
    for all clusters, or W,W,... for each."""
    anchor: Annotated[str | None, flag("RUN")] = None
    """Run on another corpus to which losses are scaled: loss=3.1,tokens=2e10,parameters=1e9
    (batch_tokens, learning_rate, sparsity if not the best; more runs after semicolons), or its
    folder."""
    from_sweep: Annotated[Path | None, flag("DIR")] = None
    """Folder of a sweep of small decoders, three sizes or more, whose losses say what the large one
    needs, instead of published runs."""
    json: JsonFile = None
    """Write the plan here, for scalejax report."""
    csv: CsvFile = None
    """Write the points of the plan here as CSV, in SI units."""
    output: Annotated[Path | None, flag("DIR")] = None
    """Folder for the plan and a plot of time and cost."""

    def execute(self, overrides: Overrides) -> None:
        """Plan, print the table, write the plan; refuse if no option meets the limits."""
        from scalejax.planning.time_to_target import notes
        from scalejax.report.html.plan import save_plan
        from scalejax.report.terminal import plan as plan_tables

        require_result_files(self.json, self.csv)
        serialization.require_writable_folder("output", self.output)
        if self.target is not None and self.target.strip().startswith(_LOSS):
            plan = self._to_loss(overrides)
        else:
            plan = self._to_metric(overrides)
        if not plan.points:
            raise DoesNotFit(notes.nothing(plan))
        tables.show(plan_tables.planned(plan))
        csv = self.csv
        for path in (self.json, self.output and self.output / "plan.json"):
            write_result(plan, path, csv, more=f"; scalejax report {path} draws it")
            csv = None
        if self.output is not None:
            save_plan(plan, path=self.output / "plan.png")
            print(f"wrote {self.output / 'plan.png'}")
        if plan.nearest is not None:
            raise DoesNotFit(notes.missed(plan))

    def _to_metric(self, overrides: Overrides) -> "Plan":
        """Plan to a test metric, from convergence points."""
        from scalejax.planning.convergence import parse_target
        from scalejax.planning.search.run import require_not_searched, searchable
        from scalejax.planning.time_to_target.run import find_convergence, plan_run

        if self.run_file is None or self.model is not None:
            said = "a plan to a test metric needs RUN.toml; --model is for --target loss=L"
            metric = (self.target or "").partition("=")[0].strip()
            if self.model is not None and nearest_name(metric, [_LOSS[:-1]]):
                said += f" (did you mean loss in place of {metric!r}?)"
            raise ConfigError(f"{said}.")
        for name in ("watts", "anchor", "from_sweep"):
            if (value := getattr(self, name)) is not None:
                raise ConfigError(refusal(name, value, "it is for --target loss=L"))
        counts = parse_counts(self.devices)
        batches = parse_counts(self.global_batch, "global_batch") if self.global_batch else []
        deadline = None if self.deadline is None else parse_seconds("deadline", self.deadline)
        target = None if self.target is None else parse_target(self.target)
        framework = framework_named(self.framework)
        options, rest = self._options(overrides)
        config = load_config(self.run_file, rest)
        facts = facts_of(config, self.run_file, rest, self.facts)
        if self.layouts == "search" and searchable(config, options[0].cluster, facts)[0]:
            accepted = "plan tries several; leave it out, or keep the file's with --layouts file"
            require_not_searched(rest, accepted)
        data = find_convergence(
            config, self.convergence, target=target, recipe=self.recipe, facts=facts
        )
        with progress.compiling_programs() as on_progress:
            return plan_run(
                config,
                options,
                counts,
                global_batches=batches,
                convergence=data,
                recipe=self.recipe,
                target=target,
                deadline_seconds=deadline,
                budget=self.budget,
                framework=framework,
                facts=facts,
                layouts=self.layouts,
                on_progress=on_progress,
            )

    def _to_loss(self, overrides: Overrides) -> "Plan":
        """Plan to a final loss of a decoder."""
        from scalejax.planning.convergence.loss_surface import anchored, published_surface
        from scalejax.planning.time_to_target.language import anchors_of, ladder_of, plan_loss

        for name in ("convergence", "recipe", "global_batch"):
            if (value := getattr(self, name)) is not None:
                raise ConfigError(refusal(name, value, "it is for a test metric, not for a loss"))
        if self.layouts != "search":
            raise ConfigError(refusal("layouts", self.layouts, "a plan to a loss searches them"))
        loss = _number("target", (self.target or "").strip().removeprefix(_LOSS))
        counts = parse_counts(self.devices)
        deadline = None if self.deadline is None else parse_seconds("deadline", self.deadline)
        framework = framework_named(self.framework)
        options, rest = self._options(overrides)
        config, name = self._decoder(rest)
        facts = facts_of(config, self.run_file or Path(), rest, self.facts)
        if self.from_sweep is not None and self.anchor is not None:
            accepted = "a ladder is of its own corpus; leave one of the two out"
            raise ConfigError(refusal("anchor", self.anchor, accepted))
        surface = published_surface() if self.from_sweep is None else ladder_of(self.from_sweep)
        if self.anchor is not None:
            surface = anchored(surface, anchors_of(self.anchor, surface))
        with progress.planning() as on_progress:
            return plan_loss(
                config,
                options,
                counts,
                surface,
                loss,
                name=name,
                deadline_seconds=deadline,
                budget=self.budget,
                framework=framework,
                facts=facts,
                on_progress=on_progress,
            )

    def _decoder(self, overrides: Overrides) -> tuple[RunConfig, str]:
        """The run whose loss is planned for, and the name of its network."""
        from scalejax.planning.search.run import SEARCHED_FIELDS, require_not_searched
        from scalejax.planning.time_to_target.language import LIKE_LLAMA, like_llama

        require_not_searched(overrides, "plan tries several; leave it out, or ask predict for one")
        if (self.run_file is None) == (self.model is None):
            raise ConfigError("plan needs either RUN.toml or --model NAME, and not both.")
        if self.model is None:
            run_file: Path = self.run_file  # type: ignore[assignment]  one of the two is given
            config = load_config(run_file, {**overrides, **SEARCHED_FIELDS})
            return config, config.model.name
        if self.model.startswith(LIKE_LLAMA):
            return like_llama(self.model, overrides), self.model
        batch: Overrides = {"batch.global_batch": 1024}
        return published_run(self.model, {**SEARCHED_FIELDS, **batch, **overrides}), self.model

    def _options(self, overrides: Overrides) -> tuple[list["ClusterOption"], Overrides]:
        """The cluster options with their prices, and the overrides of the run."""
        from scalejax.planning.time_to_target.run import ClusterOption

        names = cluster_list(self.cluster)
        prices = for_each("price", self.price, len(names))
        watts = for_each("watts", self.watts, len(names))
        found, rest, left_out = take_clusters(names, overrides)
        for note in left_out:
            say(f"note: {note}.", sys.stderr)
        options = [
            ClusterOption(
                cluster=found[name][0],
                site=found[name][1],
                price_per_device_hour=price,
                watts_per_device=power,
            )
            for name, price, power in zip(names, prices, watts, strict=True)
            if name in found
        ]
        return options, rest


def for_each(field: str, text: str | None, count: int) -> list[float | None]:
    """A number for each of `count` clusters, from one for all, from one each, or from none."""
    if text is None:
        return [None] * count
    found = _numbers(field, text)
    if len(found) not in (1, count):
        accepted = f"it must be one number, or one for each of {count} clusters"
        raise ConfigError(refusal(field, text, accepted))
    return [*found] * (count if len(found) == 1 else 1)


def _number(field: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise ConfigError(refusal(field, text, "it must be a number, as in loss=2.6")) from error
    if not math.isfinite(value):
        raise ConfigError(refusal(field, text, "it must be finite"))
    return value


def _numbers(field: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        accepted = "it must be numbers with commas between, such as 2.5 or 2.5,4"
        raise ConfigError(refusal(field, text, accepted)) from error
