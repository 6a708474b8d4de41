"""Models of the job file's sections inside jobs and roles: ports, arguments, mounts, alerts and others.

`Section` is the base class of every section with camelCase keys; alerts have the keys of Prophecis manifests.
Label, explanation and place in the form are metadata of each field (`jobs.jobfile.form`). Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from core.messages import _
from jobs.jobfile.fields import (
    Flag,
    FrameworkVersion,
    FreeValue,
    Line,
    MountSource,
    MountTarget,
    ParameterKey,
    ParameterValue,
    Path,
    RoleName,
    bounded_integer,
    validation_error,
)
from jobs.jobfile.form import form
from jobs.jobfile.limits import MAX_ITEMS
from jobs.jobfile.rules import MAX_PORTS

# Fields in which null has a meaning.
_NULLABLE_FIELDS = frozenset(
    (
        "minFailedTaskCount",
        "minSucceededTaskCount",
        "min_failed_task_count",
        "min_succeeded_task_count",
    )
)


def choice(*known: str) -> BeforeValidator:
    """Build a validator that accepts one of the known values, in upper or lower case."""

    def check(value: Any) -> str:
        found = next(
            (k for k in known if isinstance(value, str) and value.lower() == k.lower()), None
        )
        if found is None:
            raise validation_error(
                "choice",
                _("must be one of %(choices)s.", choices=", ".join(known)),
                choices=list(known),
            )
        return found

    return BeforeValidator(check)


class Section(BaseModel):
    """Base class of sections: immutable, camelCase keys in files, no unknown keys."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=to_camel,
        validate_by_alias=True,
        validate_by_name=True,
        hide_input_in_errors=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        """Drop keys with the value null, which an empty YAML value (`description:`) gives.

        Only completion counts keep null, because it means "no rule" there.
        """
        if isinstance(value, Mapping) and any(v is None for v in value.values()):
            return {k: v for k, v in value.items() if v is not None or k in _NULLABLE_FIELDS}
        return value


class Port(Section):
    """Ports reserved for each task of a role."""

    label: RoleName = Field(
        title=_("Label"),
        description=_(
            "Name of the ports inside the role, as in PAI_PORT_LIST_<role>_<index>_<label>."
        ),
        json_schema_extra=form("row"),
    )
    begin_at: Annotated[int, bounded_integer(0, 65535)] = Field(
        default=0,
        title=_("First port"),
        description=_("First port number; 0: any free ports."),
        json_schema_extra=form("row", minimum=0),
    )
    port_number: Annotated[int, bounded_integer(1, MAX_PORTS)] = Field(
        default=1,
        title=_("Number of ports"),
        description=_("Number of ports."),
        json_schema_extra=form("row", minimum=1),
    )

    @model_validator(mode="after")
    def _check_port_range(self) -> Self:
        if self.begin_at and self.begin_at + self.port_number - 1 > 65535:
            raise validation_error("ports", _("must end at 65535: lower beginAt or portNumber."))
        return self


class Parameter(Section):
    """One argument of the command."""

    key: ParameterKey = Field(
        title=_("Name"),
        description=_("Name of the argument, without dashes."),
        json_schema_extra=form("row"),
    )
    value: ParameterValue = Field(
        default="",
        title=_("Value"),
        description=_("Any text; the command gets --key=value."),
        json_schema_extra=form("row"),
    )


class Mount(Section):
    """A directory of the cluster, mounted in every task."""

    name: Line = Field(
        default="",
        description=_(
            "Name of a storage of the cluster, whose directory is mounted if source is absent."
        ),
    )
    source: MountSource = Field(
        default="",
        title=_("Directory on the cluster"),
        description=_(
            "Directory on the cluster: an absolute path or a path that starts with ~/. Absent: that of the storage in name."
        ),
        json_schema_extra=form("row", placeholder="/shared/data"),
    )
    target: MountTarget = Field(
        title=_("Path in the container"),
        description=_("Path of the directory in the container."),
        json_schema_extra=form("row", placeholder="/data"),
    )
    read_only: Flag = Field(
        default=False,
        title=_("Read-only"),
        description=_("Whether tasks can only read it."),
        json_schema_extra=form("row"),
    )


class Framework(Section):
    """The training framework; Sluice sets its variables in every task."""

    name: Line = Field(
        description=_(
            "Framework: tensorflow, pytorch, horovod, mxnet, xgboost, paddle, mindspore or mpi."
        ),
    )
    strategy: Line = Field(
        default="",
        description=_(
            "How the tasks share the work, such as ps or ddp; empty: the framework's default."
        ),
    )

    version: FrameworkVersion = Field(
        default="",
        title=_("Version"),
        description=_(
            "Version of the framework, such as 2.15: the cluster's image of this version is used. Empty: the job's image."
        ),
        json_schema_extra=form("row", widget="select"),
    )

    @model_validator(mode="before")
    @classmethod
    def _accept_name(cls, value: Any) -> Any:
        """Accept the name of a framework alone in place of the section."""
        return {"name": value} if isinstance(value, str) else value


class Code(Section):
    """Source of the job's code."""

    selector: Annotated[str, choice("codeFile", "storagePath")] = Field(
        default="storagePath",
        description=_(
            "codeFile: an archive uploaded with the job; storagePath: the directory in codeDir."
        ),
    )
    upload_id: Line = Field(
        default="",
        description=_("Id of the upload for codeFile; set by Sluice."),
    )


class Service(Section):
    """A service of a task for its owner's browser or terminal."""

    kind: Annotated[str, choice("ssh", "tensorboard", "jupyter", "vnc", "http")] = Field(
        description=_("ssh, tensorboard, jupyter, vnc or http."),
    )
    role: Line = Field(
        default="",
        description=_("Role whose tasks provide the service; empty: the first role."),
    )
    port_label: Line = Field(
        default="",
        description=_(
            "Label of the port that the service listens on; empty: the port named after its kind."
        ),
    )
    path: Path = Field(
        default="",
        description=_("Log directory for tensorboard; path to open for http."),
    )


class _AlertSection(BaseModel):
    """Base class of alerts. Keys are those of Prophecis manifests, so that alerts can be copied from them."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


def _parse_receivers(value: Any) -> Any:
    if isinstance(value, str):
        if value.count(",") + value.count(";") >= MAX_ITEMS:
            raise validation_error(
                "too_many_items", _("may have at most %(limit)s entries.", limit=MAX_ITEMS)
            )
        return [part.strip() for part in re.split(r"[,;]", value) if part.strip()]
    return value


ALERT_LEVELS = ("critical", "major", "minor", "warning", "info")
AlertLevel = Annotated[str, choice(*ALERT_LEVELS)]
Receivers = Annotated[tuple[Line, ...], BeforeValidator(_parse_receivers)]
_DEADLINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d")


def _validate_deadline(value: Any) -> str:
    if not isinstance(value, str) or not _DEADLINE.fullmatch(value):
        raise validation_error("deadline", _('must be a time such as "2030-01-31 18:00:00".'))
    return value


class EventAlert(_AlertSection):
    """An alert when the job ends."""

    event_checker: Annotated[str, choice("FAILED", "COMPLETED")] = Field(
        default="FAILED",
        title=_("Event"),
        description=_("FAILED or COMPLETED."),
        json_schema_extra=form(
            "row", choices={"FAILED": _("When it fails"), "COMPLETED": _("When it completes")}
        ),
    )
    receiver: Receivers = Field(
        default=(),
        title=_("Recipients"),
        description=_(
            "Addresses or user names, as a list or separated by commas; empty: the owner."
        ),
        json_schema_extra=form("row", placeholder=_("you")),
    )
    alert_level: AlertLevel = Field(
        default="warning",
        title=_("Level"),
        description=_("critical, major, minor, warning or info."),
        json_schema_extra=form("row", choices={level: level for level in ALERT_LEVELS}),
    )


class DeadlineAlert(_AlertSection):
    """An alert when the job has not ended at a given time."""

    deadline_checker: Annotated[str, BeforeValidator(_validate_deadline)] = Field(
        description=_("The time, as YYYY-MM-DD HH:MM:SS."),
    )
    interval: Annotated[int, bounded_integer(1, 100_000)] = Field(
        default=60,
        description=_("Minutes between two alerts while the condition holds."),
    )
    receiver: Receivers = Field(
        default=(),
        description=_(
            "Addresses or user names, as a list or separated by commas; empty: the owner."
        ),
    )
    alert_level: AlertLevel = Field(
        default="warning",
        description=_("critical, major, minor, warning or info."),
    )


class OvertimeAlert(_AlertSection):
    """An alert when the job runs longer than expected."""

    overtime_checker: Annotated[float, Field(gt=0, le=87_600)] = Field(
        title=_("Hours from start"),
        description=_("Hours from the start of the job."),
        json_schema_extra=form("row", minimum=0, initial=24),
    )
    interval: Annotated[int, bounded_integer(1, 100_000)] = Field(
        default=60,
        description=_("Minutes between two alerts while the condition holds."),
    )
    receiver: Receivers = Field(
        default=(),
        title=_("Recipients"),
        description=_(
            "Addresses or user names, as a list or separated by commas; empty: the owner."
        ),
        json_schema_extra=form("row", placeholder=_("you")),
    )
    alert_level: AlertLevel = Field(
        default="warning",
        title=_("Level"),
        description=_("critical, major, minor, warning or info."),
        json_schema_extra=form("row", choices={level: level for level in ALERT_LEVELS}),
    )


class Alerts(_AlertSection):
    """Alerts about the job."""

    event: tuple[EventAlert, ...] = Field(
        default=(),
        title=_("At the end"),
        description=_("Alerts when the job ends."),
        json_schema_extra=form("row", add=_("Add an end alert")),
    )
    deadline: tuple[DeadlineAlert, ...] = Field(
        default=(),
        description=_("Alerts when the job has not ended by a given time."),
    )
    overtime: tuple[OvertimeAlert, ...] = Field(
        default=(),
        title=_("Too long"),
        description=_("Alerts when the job runs longer than expected."),
        json_schema_extra=form("row", add=_("Add an overtime alert")),
    )


class Metrics(Section):
    """Source of the job's metrics."""

    type: Line = Field(
        default="tensorboard",
        description=_("tensorboard (event files) or regex (numbers in the log)."),
    )
    source: Path = Field(
        default="",
        alias="in",
        description=_("Directory of event files, or the log file to read."),
    )
    groups: dict[Line, FreeValue] = Field(
        default_factory=dict,
        description=_("For regex: named groups, each with a regex and its scalars."),
    )
