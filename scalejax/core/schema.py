"""JSON schemas of the dataclasses that files hold, generated from their types and docstrings.

Knows dataclasses, but not what they mean.
"""

import ast
import dataclasses
import inspect
import itertools
import textwrap
from functools import cache
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode, JsonSchemaValue
from pydantic_core import core_schema

from scalejax.core.serialization import KIND, VERSION, JsonValue, document_of

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


class _Closed(GenerateJsonSchema):
    """Closed dataclasses (no other fields), with their docstrings."""

    def dataclass_schema(self, schema: core_schema.DataclassSchema) -> JsonSchemaValue:
        found = super().dataclass_schema(schema)
        found["additionalProperties"] = False
        if self.mode == "serialization":  # what is written has every field
            found["required"] = list(found["properties"])
        for name, meaning in meanings(schema["cls"]).items():
            if (field := found["properties"].get(name)) is not None:
                field["description"] = meaning
        return found


def schema_of(type_: type) -> dict[str, JsonValue]:
    """The schema of the JSON files that `save` writes for a `document`, with kind and version."""
    kind, version = document_of(type_)
    found = _schema(type_, "serialization")
    stamp: dict[str, JsonValue] = {KIND: {"const": kind}, VERSION: {"const": version}}
    properties = found["properties"]
    assert isinstance(properties, dict)  # noqa: S101  of a dataclass
    return found | {"properties": stamp | properties, "required": [*stamp, *properties]}


def schema_of_input(type_: type) -> dict[str, JsonValue]:
    """The schema of a TOML file that is read as a dataclass: fields with a default may be left
    out."""
    return _schema(type_, "validation")


def partial(schema: JsonSchemaValue, definitions: JsonSchemaValue) -> JsonSchemaValue:
    """A schema of the same tables in which any field may be left out, as for tables that are merged
    into others; items of lists stay complete.

    Args:
        schema: schema of a table, or of something that may be one.
        definitions: the `$defs` that it refers to.
    """
    found = dict(schema)
    if "$ref" in found:
        found = definitions[found.pop("$ref").rpartition("/")[2]] | found
    for name in ("required", "default", "discriminator"):
        found.pop(name, None)
    # Without required fields, several members of a union may match.
    choices = found.pop("oneOf", None) or found.get("anyOf")
    if choices:
        found["anyOf"] = [partial(each, definitions) for each in choices]
    if isinstance(found.get("additionalProperties"), dict):
        found["additionalProperties"] = partial(found["additionalProperties"], definitions)
    if "properties" in found:
        found["properties"] = {
            name: partial(each, definitions) for name, each in found["properties"].items()
        }
    return found


def schema_of_lines(type_: object, meaning: str) -> dict[str, JsonValue]:
    """The schema of a line in a JSON Lines file, each of one class of a union, with all that it
    writes, including its `kind`."""
    return {**_schema(type_, "serialization"), "description": meaning}


def _schema(type_: Any, mode: JsonSchemaMode) -> dict[str, JsonValue]:
    adapter = TypeAdapter(type_)
    found = adapter.json_schema(mode=mode, schema_generator=_Closed)
    if "$ref" in found:  # a dataclass that holds itself
        found = found["$defs"][found["$ref"].rpartition("/")[2]] | {"$defs": found["$defs"]}
    return {"$schema": _DIALECT, **found}


@cache
def meanings(kind: type) -> dict[str, str]:
    """The docstring below each field; Python does not keep it, so the source is parsed."""
    bases = [base for base in kind.__bases__ if dataclasses.is_dataclass(base)]
    inherited = {name: doc for base in bases for name, doc in meanings(base).items()}
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    body = definition.body if isinstance(definition, ast.ClassDef) else []
    return inherited | {
        field.target.id: " ".join(doc.value.value.split())
        for field, doc in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(doc, ast.Expr)
        and isinstance(doc.value, ast.Constant)
        and isinstance(doc.value.value, str)
    }
