"""Describes the job file's fields in the reader's language, for the form, the editor and the API.

Labels, tips, help texts and order come from the field metadata of the model (`jobs.jobfile.form`). This
module translates them and derives the form control of each field from its JSON schema. It builds no HTML.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from django.utils.translation import get_language, gettext

from jobs.jobfile import build_json_schema
from jobs.jobfile.form import FORM_KEY

Schema = dict[str, Any]
CONTROL_WIDTHS = dict.fromkeys(("int", "nullint", "float", "memory"), "quarter")
LIST_CONTROLS = ("rows", "map", "section")
FULL_WIDTH_CONTROLS = ("textarea", "flag", *LIST_CONTROLS)


def localized_schema() -> Schema:
    """Return the JSON schema of job files, with titles and descriptions in the active language."""
    return copy.deepcopy(_build_localized_schema(get_language() or ""))


@lru_cache(maxsize=8)
def _build_localized_schema(language: str) -> Schema:
    schema = build_json_schema()
    for section in (schema, *schema["$defs"].values()):
        section["properties"] = {
            name: _translate_field(field) for name, field in section["properties"].items()
        }
    return schema


def _translate_field(field: Schema) -> Schema:
    translated = {
        name: _translate(value) if name in ("title", "description") else value
        for name, value in field.items()
    }
    if FORM_KEY in field:
        options = field[FORM_KEY]
        translated[FORM_KEY] = {
            **options,
            **{
                name: _translate(options[name])
                for name in ("help", "placeholder", "add")
                if name in options
            },
            "choices": {
                value: _translate(label) for value, label in options.get("choices", {}).items()
            },
        }
    return translated


def _translate(text: str) -> str:
    """Translate a text of the JSON schema. It is a plain string, but also a msgid, which `_` in the model marks."""
    return gettext(text) if text else ""


def describe_form() -> dict[str, Any]:
    """Return {"job": fields by group, "role": fields by group, "rows": the fields of a row of each list}."""
    schema = localized_schema()
    job = _group_fields(schema, schema)
    role = _group_fields(schema["$defs"]["TaskRole"], schema)
    fields = [field for groups in (job, role) for group in groups.values() for field in group]
    return {"job": job, "role": role, "rows": _build_row_templates(fields, "")}


def _build_row_templates(fields: list[dict[str, Any]], prefix: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for field in fields:
        path = f"{prefix}{field['name']}"
        if field["control"] == "rows":
            new_row = json.dumps(field["new_row"], ensure_ascii=False)
            rows.append({"path": path, "fields": field["fields"], "new_row": new_row})
        elif field["control"] == "section":
            rows += _build_row_templates(field["fields"], f"{path}.")
    return rows


def _group_fields(section: Schema, root: Schema) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for field in _describe_section_fields(section, root):
        groups.setdefault(field["group"], []).append(field)
    for fields in groups.values():
        fields.sort(key=lambda field: (field["professional"], field["control"] in LIST_CONTROLS))
    return groups


def _describe_section_fields(section: Schema, root: Schema) -> list[dict[str, Any]]:
    required = section.get("required", ())
    return [
        _describe_field(name, field, root, required=name in required)
        for name, field in section["properties"].items()
        if FORM_KEY in field
    ]


def _describe_field(name: str, field: Schema, root: Schema, *, required: bool) -> dict[str, Any]:
    options: Mapping[str, Any] = field[FORM_KEY]
    value_schema, nullable = _resolve_value_schema(field, root)
    control = options.get("widget") or _choose_control(value_schema, nullable, options)
    width = options.get("width") or CONTROL_WIDTHS.get(control)
    items = (
        _resolve_value_schema(value_schema["items"], root)[0]
        if "items" in value_schema
        else value_schema
    )
    nested = _describe_section_fields(items, root) if "properties" in items else []
    return {
        "name": name,
        "label": field.get("title", name),
        "tip": field.get("description", ""),
        "group": options["group"],
        "help": options.get("help", ""),
        "placeholder": options.get("placeholder", ""),
        "professional": options.get("professional", False),
        "distributed": options.get("distributed", False),
        "required": required,
        "default": field.get("default"),
        "minimum": options.get("minimum"),
        "max_length": value_schema.get("maxLength"),
        "choices": list(options["choices"].items()),
        "add": options.get("add", ""),
        "control": control,
        "width": width or ("full" if control in FULL_WIDTH_CONTROLS else "half"),
        "fields": nested,
        "new_row": _build_new_row(items, nested),
    }


def _resolve_value_schema(field: Schema, root: Schema) -> tuple[Schema, bool]:
    """Resolve `$ref` and `anyOf: [..., null]`. Returns the schema of the value, and whether null is allowed."""
    options = field.get("anyOf", [field])
    value_schema = next(option for option in options if option.get("type") != "null")
    if "$ref" in value_schema:
        value_schema = root["$defs"][value_schema["$ref"].rsplit("/", 1)[1]]
    return value_schema, len(options) > 1


def _choose_control(schema: Schema, nullable: bool, options: Mapping[str, Any]) -> str:
    kind = schema.get("type")
    if options["choices"]:
        return "select"
    if kind == ["string", "integer"]:
        return "duration"  # text such as 2h30m, or seconds
    if kind == "array":
        return "rows" if "$ref" in schema["items"] else "list"
    if kind == "object":
        return "section" if "properties" in schema else "map"
    names = {"boolean": "flag", "integer": "nullint" if nullable else "int", "number": "float"}
    return names.get(str(kind), "text")


def _build_new_row(items: Schema, fields: list[dict[str, Any]]) -> dict[str, Any]:
    """Build the initial value of a row that a person adds: required fields empty, others at their default."""
    row: dict[str, Any] = {}
    for field in fields:
        options = items["properties"][field["name"]][FORM_KEY]
        if "initial" in options:
            row[field["name"]] = options["initial"]
        elif field["required"]:
            row[field["name"]] = ""
        elif field["default"] or type(field["default"]) is int:
            row[field["name"]] = field["default"]
    return row
