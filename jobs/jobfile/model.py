"""The job file as one frozen pydantic model: the only definition of a job.

Files use camelCase keys, Python uses snake_case attributes. Validates what depends on the file alone;
the planner checks what depends on a namespace or a cluster. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from core.messages import _
from jobs.jobfile.fields import (
    Command,
    Duration,
    EnvName,
    EnvValue,
    Flag,
    FreeValue,
    GpuType,
    Image,
    JobName,
    Line,
    MountSource,
    MountTarget,
    ParameterKey,
    ParameterValue,
    Path,
    RoleName,
    Text,
    bounded_integer,
    format_env_value,
    identifier,
    parse_bounded_integer,
    validation_error,
)
from jobs.jobfile.rules import MAX_ROLES, MAX_TASKS, find_rule_violations

RULES_CODE = "rules"  # code of the pydantic error for all rules between fields
_NULLABLE_FIELDS = frozenset(
    (
        "minFailedTaskCount",
        "minSucceededTaskCount",
        "min_failed_task_count",
        "min_succeeded_task_count",
    )
)

_NAMESPACE_KEYS = ("namespace", "virtualCluster")
_PLACEMENT_ALIASES = {"packed": "pack", "spread": "separate", "separated": "separate", "": "auto"}


def _parse_placement(value: Any) -> Any:
    text = value.lower() if isinstance(value, str) else value
    text = _PLACEMENT_ALIASES.get(text, text) if isinstance(text, str) else text
    if text not in ("auto", "pack", "separate"):
        raise validation_error("choice", _('must be "auto", "pack" or "separate".'))
    return text


Placement = Annotated[Literal["auto", "pack", "separate"], BeforeValidator(_parse_placement)]


def _parse_count(value: Any) -> int | None:
    return None if value is None else parse_bounded_integer(value, 1, MAX_TASKS)


Count = Annotated[int | None, BeforeValidator(_parse_count)]


def choice(*known: str) -> BeforeValidator:
    """One of a few words in upper or lower case."""

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


class _Section(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=to_camel,
        validate_by_alias=True,
        validate_by_name=True,
        use_attribute_docstrings=True,
        hide_input_in_errors=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        """YAML's `description:` without a value is null; null has a meaning for counts only."""
        if isinstance(value, Mapping) and any(v is None for v in value.values()):
            return {k: v for k, v in value.items() if v is not None or k in _NULLABLE_FIELDS}
        return value


class Port(_Section):
    """Ports that a task wants for itself."""

    label: RoleName
    """Name of the ports inside the role, as in PAI_PORT_LIST_<role>_<index>_<label>."""
    begin_at: Annotated[int, bounded_integer(0, 65535)] = 0
    """First port number; 0 takes any free ones."""
    port_number: Annotated[int, bounded_integer(1, 1000)] = 1
    """How many ports."""

    @model_validator(mode="after")
    def _check_port_range(self) -> Self:
        if self.begin_at and self.begin_at + self.port_number - 1 > 65535:
            raise validation_error("ports", _("must end at 65535: lower beginAt or portNumber."))
        return self


class Parameter(_Section):
    """One argument of the command."""

    key: ParameterKey
    """Name of the argument, without dashes."""
    value: ParameterValue = ""
    """Its value, any text; the command gets --key=value."""


class Mount(_Section):
    """A directory of the cluster that every task sees."""

    name: Line = ""
    """Name for people; a storage's name where the site defines storages."""
    source: MountSource
    """Directory on the cluster: an absolute path, or one beginning with ~/."""
    target: MountTarget
    """Where it appears in the container."""
    read_only: Flag = False
    """Whether tasks may only read it."""


class Framework(_Section):
    """The training framework, whose variables Sluice sets in every task."""

    name: Line
    """Framework: tensorflow, pytorch, horovod, mxnet, xgboost, paddle or mpi."""
    strategy: Line = ""
    """How the tasks share the work, such as ps or ddp; empty takes the framework's usual one."""

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


class Code(_Section):
    """Where the job's code comes from."""

    selector: Annotated[str, choice("codeFile", "storagePath")] = "storagePath"
    """codeFile: an archive uploaded with the job; storagePath: the directory named by codeDir."""
    upload_id: Line = ""
    """Which upload, for codeFile; Sluice fills it in."""


class Service(_Section):
    """Something that a task offers to its owner's browser or terminal."""

    kind: Annotated[str, choice("ssh", "tensorboard", "jupyter", "vnc", "http")]
    """ssh, tensorboard, jupyter, vnc or http."""
    role: Line = ""
    """Role whose tasks offer it; empty: the first role."""
    port_label: Line = ""
    """Label of the port it listens on; empty: the port named for its kind."""
    path: Path = ""
    """For tensorboard the log directory, for http the path to open."""


class _AlertSection(BaseModel):
    """Keys as in Prophecis manifests, which people copy."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, hide_input_in_errors=True
    )


def _parse_receivers(value: Any) -> Any:
    if isinstance(value, str):
        return [part.strip() for part in re.split(r"[,;]", value) if part.strip()]
    return value


AlertLevel = Annotated[str, choice("critical", "major", "minor", "warning", "info")]
Receivers = Annotated[tuple[Line, ...], BeforeValidator(_parse_receivers)]
_DEADLINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d")


def _validate_deadline(value: Any) -> str:
    if not isinstance(value, str) or not _DEADLINE.fullmatch(value):
        raise validation_error("deadline", _('must be a time such as "2030-01-31 18:00:00".'))
    return value


class EventAlert(_AlertSection):
    """An alert when the job ends."""

    event_checker: Annotated[str, choice("FAILED", "COMPLETED")] = "FAILED"
    """FAILED or COMPLETED."""
    receiver: Receivers = ()
    """Who is told: addresses or user names, a list or separated by commas; empty: the owner."""
    alert_level: AlertLevel = "warning"
    """critical, major, minor, warning or info."""


class DeadlineAlert(_AlertSection):
    """An alert when the job has not ended at a given time."""

    deadline_checker: Annotated[str, BeforeValidator(_validate_deadline)]
    """The time, as YYYY-MM-DD HH:MM:SS."""
    interval: Annotated[int, bounded_integer(1, 100_000)] = 60
    """Minutes between two alerts while it lasts."""
    receiver: Receivers = ()
    """Who is told; empty: the owner."""
    alert_level: AlertLevel = "warning"
    """critical, major, minor, warning or info."""


class OvertimeAlert(_AlertSection):
    """An alert when the job runs longer than expected."""

    overtime_checker: Annotated[float, Field(gt=0, le=87_600)]
    """Hours from the start."""
    interval: Annotated[int, bounded_integer(1, 100_000)] = 60
    """Minutes between two alerts while it lasts."""
    receiver: Receivers = ()
    """Who is told; empty: the owner."""
    alert_level: AlertLevel = "warning"
    """critical, major, minor, warning or info."""


class Alerts(_AlertSection):
    """When to tell somebody about the job."""

    event: tuple[EventAlert, ...] = ()
    """Alerts at the job's end."""
    deadline: tuple[DeadlineAlert, ...] = ()
    """Alerts when a point in time passes before the end."""
    overtime: tuple[OvertimeAlert, ...] = ()
    """Alerts when the job runs longer than expected."""


class Metrics(_Section):
    """Where the curves of a job come from."""

    type: Line = "tensorboard"
    """tensorboard (event files) or regex (numbers in the log)."""
    source: Path = Field(default="", alias="in")
    """Directory of event files, or the log file to read."""
    groups: dict[Line, FreeValue] = Field(default_factory=dict)
    """For regex: named groups, each with a regex and its scalars."""


class TaskRole(_Section):
    """A kind of task: so many equal tasks, each with its own resources."""

    name: RoleName
    """Name of the role, unique in the job."""
    task_number: Annotated[int, bounded_integer(1, MAX_TASKS)] = 1
    """How many tasks of this role."""
    cpu_number: Annotated[int, bounded_integer(1, 100_000)] = 1
    """CPU cores of each task."""
    memory_mb: Annotated[int, bounded_integer(100, 10**9), Field(alias="memoryMB")] = 100
    """Memory of each task, in MiB."""
    shm_mb: Annotated[int, bounded_integer(0, 10**9), Field(alias="shmMB")] = 64
    """Size of /dev/shm of each task, in MiB, part of its memory; 0 leaves it to the container runtime."""
    gpu_number: Annotated[int, bounded_integer(0, 100_000)] = 0
    """GPUs of each task."""
    gpu_type: GpuType = ""
    """GPU type of this role; empty: the job's."""
    image: Image = ""
    """Container image of this role; empty: the job's."""
    command: Command
    """What each task runs, in bash."""
    parameters: tuple[Parameter, ...] = ()
    """Arguments added to the command in this order, each as --key=value."""
    port_list: tuple[Port, ...] = ()
    """Ports of each task, beside the ports http and ssh that every task has."""
    min_failed_task_count: Count = 1
    """So many failed tasks fail the job at once; null: failures never matter."""
    min_succeeded_task_count: Count = None
    """So many succeeded tasks complete the job at once; null: the job waits for all tasks."""
    is_main: Flag = False
    """Main role: when it fails the job fails, when it has completed the job completes."""
    env: dict[EnvName, EnvValue] = Field(default_factory=dict)
    """Environment variables of this role, over the job's."""
    placement: Placement = "auto"
    """pack: tasks of this role on as few nodes as possible; separate: each on a node of its own."""
    pre_commands: tuple[Command, ...] = ()
    """Run in the container before the command, in a shell of their own; a failure fails the task."""
    post_commands: tuple[Command, ...] = ()
    """Run in the container after the command succeeded, in a shell of their own."""
    strict_shell: Flag = False
    """Whether the command stops at its first failing line (bash's errexit, nounset, pipefail)."""

    @model_validator(mode="before")
    @classmethod
    def _accept_parameter_mapping(cls, value: Any) -> Any:
        """Accepts {lr: 0.1} for [{key: lr, value: 0.1}]."""
        if isinstance(value, Mapping) and isinstance(value.get("parameters"), Mapping):
            entries = [{"key": k, "value": v} for k, v in value["parameters"].items()]
            return {**value, "parameters": entries}
        return value

    @property
    def identifier(self) -> str:
        """The name as it stands in variable names when the name itself cannot."""
        return identifier(self.name)

    @property
    def env_texts(self) -> dict[str, str]:
        return {name: format_env_value(value) for name, value in self.env.items()}


class JobSpec(_Section):
    """A job: what to run, in how many tasks, with what."""

    job_name: JobName
    """Name of the job: letters, digits, Chinese characters and - . _ ~."""
    namespace: JobName = "default"
    """Namespace (virtualCluster is another name for it): where the job runs and whose share it uses."""
    description: Text = ""
    """Free text for people."""
    image: Image = ""
    """Container image of every role that names none; "" takes the namespace's default image."""
    auth_file: Path = ""
    """File with the registry's credentials, on the cluster."""
    data_dir: Path = ""
    """Directory with the data, read-only in the tasks."""
    output_dir: Path = ""
    """Directory for results."""
    code_dir: Path = ""
    """Directory with the code, the tasks' working directory."""
    model_dir: Path = ""
    """Directory for models."""
    gpu_type: GpuType = ""
    """GPU type of every role that names none; empty: any."""
    retry_count: Annotated[int, bounded_integer(-2, 1000)] = 0
    """Retries after the job's own failures; lost nodes do not count. -1: any failure, -2: always."""
    time_limit: Duration | None = None
    """Longest run time: seconds, 90m, 2h30m, 02:30:00 or 1-02:00:00; absent: the namespace's."""
    estimated_duration: Duration | None = None
    """How long the job will probably run; lets the page tell when it should be done."""
    placement: Placement = "auto"
    """pack: roles share nodes; separate: no two roles on one node; auto: whatever fits."""
    framework: Framework | None = None
    """Training framework and strategy, whose variables each task gets."""
    task_roles: tuple[TaskRole, ...] = Field(
        json_schema_extra={"minItems": 1, "maxItems": MAX_ROLES}
    )
    """The roles, at least one."""
    job_envs: dict[EnvName, EnvValue] = Field(default_factory=dict)
    """Environment variables of every task. isDebug: true keeps a failed task's node for a look."""
    mounts: tuple[Mount, ...] = ()
    """Further directories of the cluster that every task sees."""
    code: Code | None = None
    """Where the code comes from, if not simply from codeDir."""
    services: tuple[Service, ...] = ()
    """What tasks offer to their owner: ssh, tensorboard, jupyter, vnc, http."""
    metrics: Metrics | None = None
    """Where the job's curves come from."""
    alerts: Alerts | None = None
    """When to tell somebody about the job."""
    labels: dict[Line, Line] = Field(default_factory=dict)
    """Words to find the job by."""
    secrets: tuple[EnvName, ...] = ()
    """Variables whose values are secret: set when the job is submitted, never kept in this file."""
    imported_from: Annotated[str, choice("", "openpai-v2", "ffdl", "octopus")] = ""
    """Format that the job was written in, if not this one; it decides a few variables' form."""
    extras: dict[Line, FreeValue] = Field(default_factory=dict)
    """Anything else, kept with the job and otherwise ignored."""

    @model_validator(mode="before")
    @classmethod
    def _accept_virtual_cluster(cls, value: Any) -> Any:
        """Also accepts "" for the default namespace. A rule refuses two different values."""
        if not isinstance(value, Mapping):
            return value
        rest = {k: v for k, v in value.items() if k not in _NAMESPACE_KEYS or v not in (None, "")}
        given = [rest[key] for key in _NAMESPACE_KEYS if key in rest]
        if given and given.count(given[0]) == len(given):
            rest.pop("virtualCluster", None)
            rest["namespace"] = given[0]
        return rest

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        found = list(find_rule_violations(self))
        if found:
            raise validation_error(
                RULES_CODE, _("%(text)s", text="; ".join(f"{r.loc}: {r.message}" for r in found))
            )
        return self

    @property
    def virtual_cluster(self) -> str:
        return self.namespace

    @property
    def is_debug(self) -> bool:
        return str(self.job_envs.get("isDebug", False)).lower() == "true"

    @property
    def job_env_texts(self) -> dict[str, str]:
        return {name: format_env_value(value) for name, value in self.job_envs.items()}

    @property
    def task_count(self) -> int:
        return sum(role.task_number for role in self.task_roles)

    def role(self, name: str) -> TaskRole:
        return next(role for role in self.task_roles if role.name == name)

    def image_of(self, role: TaskRole) -> str:
        return role.image or self.image

    def gpu_type_of(self, role: TaskRole) -> str:
        return role.gpu_type or self.gpu_type
