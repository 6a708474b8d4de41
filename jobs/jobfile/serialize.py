"""Writes a spec as JSON or YAML text that loads into the same spec.

Also builds the JSON schema and the documentation's table of fields from the model. Pure.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from jobs.jobfile.fields import Duration
from jobs.jobfile.model import JobSpec
from jobs.jobfile.parse import YAML_FLOAT, YAML_INT

# Fields of the base format (OpenPAI v1). They are always written, so that a file shows the defaults that were used.
_ALWAYS_WRITTEN = frozenset(
    [
        "jobName",
        "namespace",
        "image",
        "authFile",
        "dataDir",
        "outputDir",
        "codeDir",
        "gpuType",
        "retryCount",
        "taskRoles",
    ]
)
_ALWAYS_WRITTEN_IN_ROLE = frozenset(
    [
        "name",
        "taskNumber",
        "cpuNumber",
        "memoryMB",
        "shmMB",
        "gpuNumber",
        "command",
        "portList",
        "minFailedTaskCount",
        "minSucceededTaskCount",
    ]
)


def to_document(spec: JobSpec) -> dict[str, Any]:
    """Convert a spec to the mapping of a job file. Leaves out fields that are empty and not in the base format."""
    full = spec.model_dump(mode="json", by_alias=True)
    document = {
        key: value for key, value in full.items() if key in _ALWAYS_WRITTEN or _is_set(key, value)
    }
    roles = []
    for role in document["taskRoles"]:
        role_document = {
            k: v for k, v in role.items() if k in _ALWAYS_WRITTEN_IN_ROLE or _is_set(k, v)
        }
        roles.append(role_document)
    document["taskRoles"] = roles
    return document


def _is_set(key: str, value: Any) -> bool:
    return value not in (None, "", [], {}, False) and (key, value) != ("placement", "auto")


def dump(spec: JobSpec, format: Literal["json", "yaml"] = "json") -> str:
    """Write a spec as text. Loading the text gives the same spec."""
    return dump_document(to_document(spec), format)


def dump_document(document: Any, format: Literal["json", "yaml"] = "json") -> str:
    """Write a document as text in the same style, even if it is not a valid job file."""
    if format == "json":
        return json.dumps(document, ensure_ascii=False, indent=2) + "\n"
    return yaml.dump(
        document,
        Dumper=_Dumper,
        allow_unicode=True,
        sort_keys=False,
        width=100,
        default_flow_style=False,
    )


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that quotes text which YAML 1.1 or 1.2 would read as another type, and writes no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_str(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = None
    if _fits_block_style(text):
        style = "|"
    elif not text.isprintable():
        style = '"'  # only double quotes can escape non-printable characters
    elif YAML_INT.fullmatch(text) or YAML_FLOAT.fullmatch(text):
        style = "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _fits_block_style(text: str) -> bool:
    lines = text.split("\n")
    return (
        len(lines) > 1
        and all(line.isprintable() and line == line.rstrip() for line in lines)
        and bool(lines[0])
        and not lines[0][0].isspace()
    )


_Dumper.add_representer(str, _represent_str)


# Schema and documentation


def build_json_schema() -> dict[str, Any]:
    """Build the JSON schema of job files, for editors and the OpenAPI document."""
    schema = JobSpec.model_json_schema(by_alias=True)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "Sluice job file"
    schema["properties"]["virtualCluster"] = {
        "type": "string",
        "description": "Another name for namespace.",
    }
    return schema


@dataclass(frozen=True, slots=True)
class FieldRow:
    """One row of the documentation's table of fields."""

    path: str
    kind: str
    required: bool
    default: str
    description: str


def list_fields() -> list[FieldRow]:
    """List every field of the job file in the model's order, nested fields after their parent."""
    return _build_field_rows(JobSpec, "")


def render_field_table() -> str:
    """Render the table of fields for the documentation, in Markdown."""
    lines = ["| field | kind | default | meaning |", "|---|---|---|---|"]
    for row in list_fields():
        default = "required" if row.required else f"`{row.default}`" if row.default else ""
        meaning = row.description.replace("|", "\\|")
        lines.append(f"| `{row.path}` | {row.kind} | {default} | {meaning} |")
    return "\n".join(lines) + "\n"


def _build_field_rows(model: type[BaseModel], prefix: str) -> list[FieldRow]:
    rows = []
    for name, field in model.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        nested, is_list = _find_nested_model(field.annotation)
        rows.append(
            FieldRow(
                path=path,
                kind=_name_field_kind(field),
                required=field.is_required(),
                default=_format_default(field),
                description=field.description or "",
            )
        )
        if nested is not None:
            rows += _build_field_rows(nested, path + ("[]." if is_list else "."))
    return rows


def _find_nested_model(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """Find the model in a field's annotation: (model or None, whether the field is a list of it)."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    origin = get_origin(annotation)
    if origin in (tuple, Union, UnionType):
        for argument in get_args(annotation):
            model, _ = _find_nested_model(argument)
            if model is not None:
                return model, origin is tuple
    return None, False


def _name_field_kind(field: FieldInfo) -> str:
    annotation = field.annotation
    nested, is_list = _find_nested_model(annotation)
    if is_list or get_origin(annotation) is tuple:
        return "list"
    if nested is not None or get_origin(annotation) is dict:
        return "mapping"
    if Duration in get_args(annotation):
        return "duration"
    arguments = [a for a in (get_args(annotation) or (annotation,)) if a is not type(None)]
    kind_names = {str: "text", int: "whole number", float: "number", bool: "true or false"}
    return kind_names.get(arguments[0], "text")


def _format_default(field: FieldInfo) -> str:
    if field.is_required():
        return ""
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is None:
        return "null"
    if value in ((), {}):
        return ""
    return json.dumps(value)
