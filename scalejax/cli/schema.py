"""The command `schema`: the fields of every file that scalejax writes or reads, as JSON Schema.

Imported without JAX.
"""

import json
import textwrap
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional

from scalejax.cli.command import PlainCommand, flag
from scalejax.core import serialization
from scalejax.core.errors import ConfigError, unknown_name
from scalejax.core.serialization import JsonValue

_WRITTEN_BY = (
    "core.elastic",
    "config.dataset_facts",
    "data.convert.convert",
    "data.convert.shards",
    "data.inspect",
    "emulation.record",
    "measure.bench.plan",
    "measure.bench.results",
    "measure.doctor.finding",
    "planning.convergence.loss_surface",
    "planning.run_cost",
    "planning.search.run",
    "planning.time_to_target.plan",
    "report.listings",
    "simulator.comparison",
    "simulator.explain.explanation",
    "simulator.predict",
    "simulator.program",
    "simulator.ramp",
    "sweep.coordinates",
    "sweep.plan",
    "sweep.results",
    "sweep.study",
    "training.data_fingerprints",
    "training.manifest",
    "training.start",
    "validation.accuracy",
    "validation.evaluation",
)
"""Modules of `scalejax` that define the classes of documents."""


@cache
def schemas() -> dict[str, dict[str, JsonValue]]:
    """The schema of each kind of document, and of run.toml and a cluster's file, by name."""
    from scalejax.core.schema import schema_of, schema_of_lines
    from scalejax.training.record import Measurement

    for module in _WRITTEN_BY:
        import_module(f"scalejax.{module}")
    found = {kind: schema_of(type_) for kind, type_ in serialization.documents().items()}
    found["run.toml"] = _of_run_file()
    found["cluster.toml"] = _of_cluster_file()
    found["measurements.jsonl"] = schema_of_lines(Measurement, "A line of a run's measurements.")
    return dict(sorted(found.items()))


def _of_run_file() -> dict[str, Any]:
    """The schema of a run.toml, whose model may also be a published network by name."""
    from scalejax.config.presets import PRESETS
    from scalejax.config.run import RunConfig
    from scalejax.core.schema import partial, schema_of_input

    found: dict[str, Any] = schema_of_input(RunConfig)
    model, definitions = found["properties"]["model"], found["$defs"]
    architectures: dict[str, list[str]] = {}
    for name, preset in PRESETS.items():
        architectures.setdefault(preset.network, []).append(name)
    published = []
    for network, names in architectures.items():
        reference = model["discriminator"]["mapping"][network]
        each = partial({"$ref": reference}, definitions)
        each["description"] = "A published network; its other fields may be given too."
        each["properties"]["name"] = {"enum": names}
        published.append(each | {"required": ["name"]})
    found["properties"]["model"] = {"anyOf": [model, *published]}
    return found


def _of_cluster_file() -> dict[str, Any]:
    """The schema of a cluster's file: the cluster, its site, and what it is based on; parts may be
    given by name."""
    from scalejax.core.schema import partial, schema_of_input
    from scalejax.hardware import Cluster, Site
    from scalejax.hardware.catalogue import LAUNCH_MODES, NAMED_PARTS, names_in

    def named(folder: str) -> dict[str, Any]:
        return {"anyOf": [{"enum": [*names_in(folder)]}, {"type": "string", "pattern": "[.]toml$"}]}

    found: dict[str, Any] = schema_of_input(Cluster)
    site: dict[str, Any] = schema_of_input(Site)
    definitions = found["$defs"] | site["$defs"]
    properties = found["properties"] | site["properties"]
    shared = definitions["SharedChip"]["properties"]
    for part, folder in NAMED_PARTS.items():
        properties[part] = {"anyOf": [properties[part], named(folder)]}
    shared["chip"] = {"anyOf": [shared["chip"], named(NAMED_PARTS["chip"])]}
    definitions["RunConditions"]["properties"] |= {
        **{name: {"type": "boolean"} for name in LAUNCH_MODES},
        "dispatch": {"enum": [*names_in("dispatch"), "all_to_all"]},
    }
    properties["based_on"] = {
        **named("clusters"),
        "description": "Cluster, or the path of its file, whose values hold where none are given.",
    }
    whole = {"properties": properties, "required": found["required"]}
    return {
        **partial(found | whole, definitions),
        "$defs": definitions,
        "if": {"required": ["based_on"]},
        "else": whole,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema(PlainCommand):
    """Print the JSON schema of a file that scalejax writes.

    Covers what --json writes and the files in folders of runs, sweeps and benches, each of which
    states its kind in its first line; and run.toml and cluster.toml, for editors and other
    programs.
    """

    kind: Annotated[Positional[str | None], flag("KIND")] = None
    """Kind of document, such as scaling_prediction, or run.toml. By default they are listed."""
    output: Annotated[Path | None, flag("DIR")] = None
    """Write it, or all of them, into this folder, as KIND.schema.json."""

    def execute(self) -> None:
        """Print or write the schema, or list the kinds."""
        serialization.require_writable_folder("output", self.output)
        every = schemas()
        if self.kind is not None and self.kind not in every:
            raise ConfigError(unknown_name("kind", self.kind, every))
        chosen = every if self.kind is None else {self.kind: every[self.kind]}
        if self.output is not None:
            for kind, each in chosen.items():
                path = self.output / f"{kind}.schema.json"
                serialization.save_text(json.dumps(each, indent=1) + "\n", path)
            print(f"wrote {len(chosen)} schemas into {self.output}")
        elif self.kind is not None:
            print(json.dumps(every[self.kind], indent=1))
        else:
            for kind, each in every.items():
                meaning = str(each.get("description", "")).split("\n\n")[0]
                print(f"{kind:<21}{textwrap.shorten(meaning, 59, placeholder=' ...')}")
