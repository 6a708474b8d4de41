"""The job file: its model, how text becomes it and how it becomes text again."""

from __future__ import annotations

from jobs.jobfile.errors import Problem, SpecError, Warning
from jobs.jobfile.model import (
    Alerts,
    Code,
    Framework,
    JobSpec,
    Metrics,
    Mount,
    Parameter,
    Port,
    Service,
    TaskRole,
)
from jobs.jobfile.serialize import (
    dump,
    dump_document,
    field_markdown,
    field_table,
    json_schema,
    to_document,
)

__all__ = [
    "Alerts",
    "Code",
    "Framework",
    "JobSpec",
    "Metrics",
    "Mount",
    "Parameter",
    "Port",
    "Problem",
    "Service",
    "SpecError",
    "TaskRole",
    "Warning",
    "dump",
    "dump_document",
    "field_markdown",
    "field_table",
    "json_schema",
    "to_document",
]
