"""The job file: its model, and functions that read and write its text."""

from __future__ import annotations

from jobs.jobfile.errors import Problem, SpecError, SpecWarning
from jobs.jobfile.model import JobSpec, TaskRole
from jobs.jobfile.sections import (
    Alerts,
    Code,
    Framework,
    Metrics,
    Mount,
    Parameter,
    Port,
    Service,
)
from jobs.jobfile.serialize import (
    build_json_schema,
    dump,
    dump_document,
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
    "SpecWarning",
    "TaskRole",
    "build_json_schema",
    "dump",
    "dump_document",
    "to_document",
]
