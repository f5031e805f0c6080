"""The grammar of a sweep: expands parameters, variables and extensions into the fields of each run.

The grammar and its precedence are those of HPE's Deep Learning Benchmarking Suite
(github.com/HewlettPackard/dlcookbook-dlbs, `experimenter.py`, 2022): values are JSON; every
combination of the variables is merged over the parameters; then extensions, in order, override or
fork the combinations that match them. Knows fields as dotted names and values, but not their
meaning.
"""

import itertools
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import cast

from scalejax.config.migrate import current_fields, current_name
from scalejax.core.errors import ConfigError, refusal, shortened, unknown_name
from scalejax.core.serialization import JsonValue, plain

Fields = dict[str, JsonValue]
"""Values by dotted field name."""

_TEMPLATE = re.compile(r"\$\{([^${}]+)\}")
_PARTS = ("condition", "parameters", "cases")


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """Replacement of fields in the runs that match a condition."""

    condition: Fields
    """Accepted value of each field, or a list of them; a string is a regular expression that
    matches the whole value. Empty: every run."""
    parameters: Fields
    """Fields that are replaced."""
    cases: tuple[Fields, ...]
    """Fields of each run that a matching run is forked into; empty: it stays one run."""

    def matches(self, fields: Mapping[str, JsonValue]) -> bool:
        """Whether a run with `fields` meets the condition; a missing field matches nothing."""
        return all(
            name in fields and any(_matches_value(fields[name], each) for each in _as_list(wanted))
            for name, wanted in self.condition.items()
        )

    def applied(self, fields: Fields) -> list[Fields]:
        """Fields of the runs that replace a run with `fields`."""
        return [fields | self.parameters | case for case in self.cases or ({},)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Range of a hyper-parameter for a search."""

    low: float
    """Smallest value; like `high`, a whole number if the field is one."""
    high: float
    """Largest value."""
    log: bool
    """Whether values are sampled uniformly in the logarithm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """Parsed parameters, variables and extensions of a sweep."""

    parameters: Fields
    """-P: fields of every run."""
    variables: dict[str, list[JsonValue]]
    """-V: values; every combination of them is a run."""
    extensions: tuple[Extension, ...] = ()
    """-E: extensions, in order."""
    ranges: dict[str, Range] = field(default_factory=dict)
    """-V with low and high: for searches, which choose values before runs are planned."""

    def expanded(self, file: Mapping[str, JsonValue]) -> list[Fields]:
        """The fields that each run replaces in its file, with templates resolved; the last variable
        changes fastest.

        Precedence: file < parameters < variables < extensions.

        Args:
            file: fields of the run.toml by dotted name, which conditions and templates see.

        Raises:
            ConfigError: if a template names an unknown field or itself, or a variable is a range.
        """
        for name in self.ranges:
            accepted = "a range is for --optuna to choose from; give a list of values"
            raise ConfigError(refusal(f"-V {name}", "{...}", accepted))
        runs, _ = self._extended(file)
        return [_with_templates_resolved(fields, {**file, **fields}) for fields in runs]

    def require_met_conditions(self, file: Mapping[str, JsonValue]) -> None:
        """Refuse an extension whose condition no run matches.

        Raises:
            ConfigError: naming the condition, and how to add a field that no run has.
        """
        _, unmet = self._extended(file)
        known = {*file, *self.parameters, *self.named_fields()}
        for extension in unmet:
            accepted = "it matches none of the runs"
            for name, wanted in extension.condition.items():
                if name not in known:
                    value = json.dumps((_as_list(wanted) or [None])[0])
                    accepted += (
                        f"; {name} is neither in the file nor among the sweep's fields: "
                        f"-P '{name}={value}' adds it"
                    )
            raise ConfigError(refusal("-E condition", extension.condition, accepted))

    def _extended(self, file: Mapping[str, JsonValue]) -> tuple[list[Fields], list[Extension]]:
        """The runs with unresolved templates, and the extensions that matched none."""
        names = list(self.variables)
        runs = [
            self.parameters | dict(zip(names, values, strict=True))
            for values in itertools.product(*self.variables.values())
        ]
        unmet = []
        for extension in self.extensions:
            matched = [extension.matches({**file, **fields}) for fields in runs]
            if not any(matched):
                unmet.append(extension)
            runs = [
                changed
                for fields, is_met in zip(runs, matched, strict=True)
                for changed in (extension.applied(fields) if is_met else [fields])
            ]
        return runs, unmet

    def named_fields(self) -> list[str]:
        """Every field in which runs may differ, in the order in which they were named."""
        changed = (
            fields
            for extension in self.extensions
            for fields in (extension.parameters, *extension.cases)
        )
        return list(dict.fromkeys([*self.variables, *itertools.chain.from_iterable(changed)]))


def parse_grammar(
    parameters: Iterable[str], variables: Iterable[str], extensions: Iterable[str]
) -> Grammar:
    """The grammar in strings such as 'train.epochs=3', 'seed=[0,1]' and '{"cases": [...]}'.

    Raises:
        ConfigError: if a string is malformed, naming what is accepted.
    """
    pairs = [_current_pair(*_variable(text)) for text in variables]
    return Grammar(
        parameters=current_fields(
            flat_fields(dict(_assignment("-P", text) for text in parameters))
        ),
        variables={name: value for name, value in pairs if isinstance(value, list)},
        ranges={name: value for name, value in pairs if isinstance(value, Range)},
        extensions=tuple(map(_extension, extensions)),
    )


def _current_pair(
    name: str, values: list[JsonValue] | Range
) -> tuple[str, list[JsonValue] | Range]:
    """A variable under the current names of fields and values."""
    if isinstance(values, Range):
        return current_name(name), values
    ((now, listed),) = current_fields({name: values}).items()
    assert isinstance(listed, list)  # noqa: S101  lists stay lists
    return now, listed


def _assignment(flag: str, text: str) -> tuple[str, JsonValue]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        accepted = "it must be field=value, the value in JSON"
        raise ConfigError(f"{flag} {shortened(text)} is refused: {accepted}.")
    return name.strip(), _json(f"{flag} {name.strip()}", value)


def _json(field: str, text: str) -> JsonValue:
    try:
        return json.loads(text, parse_constant=_no_number)
    except ValueError as error:
        accepted = f"it must be JSON ({error}){_suggestion(field, text)}"
        raise ConfigError(refusal(field, text, accepted)) from error


def _suggestion(field: str, text: str) -> str:
    """A hint with the JSON that was probably meant; empty for nested values."""
    bare = text.strip().strip("'\"")
    if "{" in bare or "[" in bare[1:] or bare != shortened(bare):
        return ""
    if not (field.startswith("-V") or bare.startswith("[")):
        return f"; a text is written '{json.dumps(bare)}', its quotes included"
    items = [item.strip().strip("'\"") for item in bare.strip("[]").split(",")]
    return f"; try '[{','.join(item if _is_json(item) else json.dumps(item) for item in items)}]'"


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_no_number)
    except ValueError:
        return False
    return True


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")


def _variable(text: str) -> tuple[str, list[JsonValue] | Range]:
    name, values = _assignment("-V", text)
    if isinstance(values, dict):
        return name, _range(f"-V {name}", values)
    if not isinstance(values, list) or not values:
        accepted = f"it must be a list of values, such as '{name}=[{json.dumps(values)}]'"
        raise ConfigError(refusal(f"-V {name}", values, accepted))
    return name, values


def _range(flag: str, value: dict[str, JsonValue]) -> Range:
    low, high, log = value.get("low"), value.get("high"), value.get("log", False)
    is_range = isinstance(low, int | float) and isinstance(high, int | float) and low < high
    if not is_range or not isinstance(log, bool) or not value.keys() <= {"low", "high", "log"}:
        accepted = 'it must be a list, or {"low": NUMBER, "high": NUMBER, "log": true or false}'
        raise ConfigError(refusal(flag, json.dumps(value), accepted))
    return Range(low=low, high=high, log=log)  # type: ignore[arg-type]  checked above


def _extension(text: str) -> Extension:
    value = _json("-E", text)
    if not isinstance(value, dict):
        raise ConfigError(refusal("-E", text, f"it must be an object of {', '.join(_PARTS)}"))
    for part in value:
        if part not in _PARTS:
            raise ConfigError(unknown_name("-E", part, _PARTS))
    condition, parameters = value.get("condition", {}), value.get("parameters", {})
    cases = value.get("cases", [])
    if not isinstance(condition, dict) or not isinstance(parameters, dict):
        raise ConfigError(refusal("-E", text, "condition and parameters must be objects"))
    if not isinstance(cases, list) or not all(isinstance(case, dict) for case in cases):
        raise ConfigError(refusal("-E", text, "cases must be a list of objects"))
    for name, wanted in flat_fields(condition).items():
        for each in _as_list(wanted):
            try:
                re.compile(each if isinstance(each, str) else "")
            except re.error as error:
                accepted = f"it must be a regular expression ({error})"
                raise ConfigError(refusal(f"-E condition {name}", each, accepted)) from error
    if not parameters and not cases:
        raise ConfigError(refusal("-E", text, "it must have parameters or cases, or both"))
    return Extension(
        condition=current_fields(flat_fields(condition)),
        parameters=current_fields(flat_fields(parameters)),
        cases=tuple(current_fields(flat_fields(case)) for case in cases if isinstance(case, dict)),
    )


def flat_fields(table: Mapping[str, JsonValue], prefix: str = "") -> Fields:
    """The fields of nested tables by dotted name."""
    flat: Fields = {}
    for name, value in table.items():
        path = f"{prefix}.{name}" if prefix else name
        flat |= flat_fields(value, path) if isinstance(value, dict) else {path: value}
    return flat


def fields_of(described: object) -> Fields:
    """The fields of a dataclass and of nested ones, by dotted name."""
    return flat_fields(cast(Fields, plain(described)))


def _as_list(value: JsonValue) -> list[JsonValue]:
    return value if isinstance(value, list) else [value]


def _matches_value(value: JsonValue, wanted: JsonValue) -> bool:
    if isinstance(wanted, str) and isinstance(value, str):
        return wanted == value or re.fullmatch(wanted, value) is not None
    # True equals 1 in Python, but not in JSON.
    return isinstance(wanted, bool) == isinstance(value, bool) and wanted == value


# Templates.


def _with_templates_resolved(fields: Fields, known: Mapping[str, JsonValue]) -> Fields:
    """`fields` with the templates in their strings replaced by values of `known`."""
    return {name: _resolved(value, known, (name,)) for name, value in fields.items()}


def _resolved(value: JsonValue, known: Mapping[str, JsonValue], path: tuple[str, ...]) -> JsonValue:
    """`value` with templates resolved; a string that is a single template takes the type of the
    value that it names."""
    if isinstance(value, list):
        return [_resolved(each, known, path) for each in value]
    while isinstance(value, str) and (found := _TEMPLATE.search(value)):
        inner = _template_value(found[1], known, path)
        if found[0] == value:
            value = inner
        else:
            text = inner if isinstance(inner, str) else json.dumps(inner)
            value = value[: found.start()] + text + value[found.end() :]
    return value


def _template_value(name: str, known: Mapping[str, JsonValue], path: tuple[str, ...]) -> JsonValue:
    """The value of the template ${name}: that of a field, or else of an environment variable."""
    if name in path:
        cycle = " -> ".join((*path[path.index(name) :], name))
        raise ConfigError(refusal(path[0], f"${{{name}}}", f"it names itself: {cycle}"))
    if name in known:
        return _resolved(known[name], known, (*path, name))
    if name in os.environ:
        return os.environ[name]
    raise ConfigError(
        refusal(
            path[0], f"${{{name}}}", "it must name a field of the run or an environment variable"
        )
    )
