"""The table of job file fields in docs/jobfile.md, built from the model; a test compares both."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from jobs.jobfile import JobSpec
from jobs.jobfile.fields import Duration


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
