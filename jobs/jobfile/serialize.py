"""Writes a spec as JSON or YAML text that loads into the same spec.

Also builds the JSON schema of job files from the model. Pure.
"""

from __future__ import annotations

import json
from typing import Any, Literal

import yaml

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
    """Convert a spec to the mapping of a job file. Leaves out unset fields that are not in the base format."""
    full = spec.model_dump(mode="json", by_alias=True)
    document = _drop_unset_fields(full, _ALWAYS_WRITTEN)
    document["taskRoles"] = [
        _drop_unset_fields(role, _ALWAYS_WRITTEN_IN_ROLE) for role in full["taskRoles"]
    ]
    return document


def _drop_unset_fields(section: dict[str, Any], always_written: frozenset[str]) -> dict[str, Any]:
    return {
        key: value
        for key, value in section.items()
        if key in always_written
        or (value not in (None, "", [], {}, False) and (key, value) != ("placement", "auto"))
    }


def dump(spec: JobSpec, format: Literal["json", "yaml"] = "json") -> str:
    """Write a spec as text. Loading the text gives the same spec."""
    return dump_document(to_document(spec), format)


def dump_document(document: Any, format: Literal["json", "yaml"] = "json") -> str:
    """Write a document, which need not be a valid job file, as text in the style of `dump`."""
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
