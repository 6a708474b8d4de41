"""The job file as one frozen pydantic model: the single definition of a job.

Files use camelCase keys, Python uses snake_case attributes. The metadata of a field contains its label (`title`),
its explanation (`description`) and its place in the submit form (`form`). The model checks what can be checked
with the file alone; `jobs.plan` checks a job against its namespace and cluster. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from core.cancellation import checkpoint
from core.messages import _
from jobs.jobfile.fields import (
    MEMORY_SCHEMA,
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
    Path,
    RoleName,
    RoleTitle,
    Text,
    bounded_integer,
    bounded_memory,
    format_env_value,
    parse_bounded_integer,
    validation_error,
)
from jobs.jobfile.form import form
from jobs.jobfile.rules import MAX_ROLES, MAX_TASKS, find_rule_violations
from jobs.jobfile.sections import (
    Alerts,
    Code,
    Framework,
    Metrics,
    Mount,
    Parameter,
    Port,
    Section,
    Service,
    choice,
)

RULES_CODE = "rules"  # code of the pydantic error that reports violated rules between fields
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


class TaskRole(Section):
    """A named group of identical tasks."""

    name: RoleName = Field(
        title=_("Role name"),
        description=_("Name of the role, unique in the job."),
        json_schema_extra=form("role", distributed=True, width="quarter"),
    )
    title: RoleTitle = Field(
        default="",
        title=_("Title"),
        description=_(
            "Name shown on pages beside the role's name, in any characters, such as 训练."
        ),
        json_schema_extra=form("role", distributed=True, width="quarter"),
    )
    task_number: Annotated[int, bounded_integer(1, MAX_TASKS)] = Field(
        default=1,
        title=_("Tasks"),
        description=_("Number of tasks of this role."),
        json_schema_extra=form("role", distributed=True, minimum=1),
    )
    cpu_number: Annotated[int, bounded_integer(1, 100_000)] = Field(
        default=1,
        title=_("CPUs"),
        description=_("CPU cores of each task."),
        json_schema_extra=form("resources", minimum=1),
    )
    memory_mb: Annotated[
        int, bounded_memory(100, 10**9), MEMORY_SCHEMA, Field(alias="memoryMB")
    ] = Field(
        default=100,
        title=_("Memory"),
        description=_("Memory of each task, in MiB or with a unit: 512 MB, 4 GB."),
        json_schema_extra=form("resources", widget="memory", placeholder="4 GB"),
    )
    shm_mb: Annotated[int, bounded_memory(0, 10**9), MEMORY_SCHEMA, Field(alias="shmMB")] = Field(
        default=64,
        title=_("Shared memory"),
        description=_(
            "Size of /dev/shm of each task, in MiB or with a unit; part of its memory. 0: /dev/shm of the node."
        ),
        json_schema_extra=form("resources", widget="memory", placeholder="64 MB"),
    )
    gpu_number: Annotated[int, bounded_integer(0, 100_000)] = Field(
        default=0,
        title=_("GPUs"),
        description=_("GPUs of each task."),
        json_schema_extra=form("resources", minimum=0),
    )
    gpu_type: GpuType = Field(
        default="",
        title=_("GPU type"),
        description=_("GPU type of this role; empty: the job's."),
        json_schema_extra=form("resources", widget="select", width="quarter"),
    )
    image: Image = Field(
        default="",
        title=_("Image of this role"),
        description=_("Container image of this role; empty: the job's."),
        json_schema_extra=form("advanced", professional=True, placeholder=_("the job’s image")),
    )
    command: Command = Field(
        title=_("Command"),
        description=_("Bash command of each task."),
        json_schema_extra=form("command", widget="textarea"),
    )
    parameters: tuple[Parameter, ...] = Field(
        default=(),
        title=_("Arguments"),
        description=_("Arguments appended to the command in this order, each as --key=value."),
        json_schema_extra=form("command", add=_("Add an argument")),
    )
    port_list: tuple[Port, ...] = Field(
        default=(),
        title=_("Ports"),
        description=_(
            "Ports of each task in addition to the ports http and ssh that every task has."
        ),
        json_schema_extra=form(
            "advanced",
            professional=True,
            help=_("Every task has ports named http and ssh."),
            add=_("Add ports"),
        ),
    )
    min_failed_task_count: Count = Field(
        default=1,
        title=_("Fail after"),
        description=_(
            "Number of failed tasks that fails the job at once; null: failed tasks do not fail the job."
        ),
        json_schema_extra=form(
            "role", distributed=True, minimum=1, help=_("failed tasks"), placeholder=_("never")
        ),
    )
    min_succeeded_task_count: Count = Field(
        default=None,
        title=_("Complete after"),
        description=_(
            "Number of succeeded tasks that completes the job at once; null: the job waits for all tasks."
        ),
        json_schema_extra=form(
            "role", distributed=True, minimum=1, help=_("succeeded tasks"), placeholder=_("all")
        ),
    )
    is_main: Flag = Field(
        default=False,
        title=_("Main role: the job ends when this role ends"),
        description=_("Main role: the job fails when it fails and completes when it completes."),
        json_schema_extra=form("role", distributed=True),
    )
    env: dict[EnvName, EnvValue] = Field(
        default_factory=dict,
        title=_("Environment variables of this role"),
        description=_("Environment variables of this role; they override the job's."),
        json_schema_extra=form("advanced", professional=True, add=_("Add a variable")),
    )
    placement: Placement = Field(
        default="auto",
        title=_("Placement of its tasks"),
        description=_(
            "pack: tasks of this role on as few nodes as possible; separate: one task per node; auto: any placement."
        ),
        json_schema_extra=form(
            "advanced",
            professional=True,
            choices={
                "auto": _("Any nodes"),
                "pack": _("As few nodes as possible"),
                "separate": _("One task per node"),
            },
        ),
    )
    pre_commands: tuple[Command, ...] = Field(
        default=(),
        description=_(
            "Commands run in the container before the command, in a shell of their own; a failure fails the task."
        ),
    )
    post_commands: tuple[Command, ...] = Field(
        default=(),
        description=_(
            "Commands run in the container after the command succeeded, in a shell of their own."
        ),
    )
    strict_shell: Flag = Field(
        default=False,
        description=_(
            "Whether the command stops at the first failing line (bash's errexit, nounset, pipefail)."
        ),
    )

    @model_validator(mode="before")
    @classmethod
    def _accept_parameter_mapping(cls, value: Any) -> Any:
        """Convert parameters written as {lr: 0.1} to [{key: lr, value: 0.1}]."""
        checkpoint()  # once per role
        if isinstance(value, Mapping) and isinstance(value.get("parameters"), Mapping):
            entries = [{"key": k, "value": v} for k, v in value["parameters"].items()]
            return {**value, "parameters": entries}
        return value

    @property
    def env_texts(self) -> dict[str, str]:
        return {name: format_env_value(value) for name, value in self.env.items()}


class JobSpec(Section):
    """A job: roles, resources and commands."""

    job_name: JobName = Field(
        title=_("Job name"),
        description=_("Name of the job: letters, digits, Chinese characters and - . _ ~."),
        json_schema_extra=form("basics"),
    )
    namespace: JobName = Field(
        default="default",
        title=_("Namespace"),
        description=_(
            "Namespace (alias: virtualCluster) that the job runs in; it decides partitions, account and limits."
        ),
        json_schema_extra=form("basics", widget="select"),
    )
    description: Text = Field(
        default="",
        title=_("Description"),
        description=_("Free text."),
        json_schema_extra=form("basics", width="full"),
    )
    image: Image = Field(
        default="",
        title=_("Container image"),
        description=_(
            "Container image of every role without one of its own; empty: the namespace's default image."
        ),
        json_schema_extra=form(
            "basics",
            help=_(
                "An image name in a registry, a path on the cluster or a name defined by the site."
            ),
        ),
    )
    auth_file: Path = Field(
        default="",
        title=_("Registry credentials file"),
        description=_("File on the cluster with the registry's credentials."),
        json_schema_extra=form("directories", professional=True),
    )
    data_dir: Path = Field(
        default="",
        title=_("Data directory"),
        description=_("Directory with the data, read-only in the tasks."),
        json_schema_extra=form(
            "directories", help=_("Read-only in the tasks, as DATA_DIR."), placeholder="/data/set"
        ),
    )
    output_dir: Path = Field(
        default="",
        title=_("Output directory"),
        description=_(
            "Directory for results, RESULT_DIR and PAI_OUTPUT_DIR in the tasks; it is created if it does not exist. "
            "Empty: a directory of the job's own, which its attempts share."
        ),
        json_schema_extra=form(
            "directories",
            help=_("Empty: a directory of the job. RESULT_DIR in the tasks."),
            placeholder="~/results",
        ),
    )
    code_dir: Path = Field(
        default="",
        title=_("Code directory"),
        description=_(
            "Directory with the code, at most 200 MB. It is copied for each attempt; the copy is the working directory "
            "of the tasks and their /code."
        ),
        json_schema_extra=form(
            "code", help=_("Copied for the job, at most 200 MB."), placeholder="~/project"
        ),
    )
    model_dir: Path = Field(
        default="",
        title=_("Model directory"),
        description=_(
            "Directory for models, MODEL_DIR and /model in the tasks; it is created if it does not exist. Empty: a "
            "directory of the job's own, which is at /model in Octopus files only. In FfDL manifests MODEL_DIR is the code."
        ),
        json_schema_extra=form(
            "directories",
            professional=True,
            help=_("Empty: a directory of the job. MODEL_DIR in the tasks."),
        ),
    )
    gpu_type: GpuType = Field(
        default="",
        title=_("GPU type"),
        description=_("GPU type of every role without one of its own; empty: any."),
        json_schema_extra=form("basics", widget="select"),
    )
    retry_count: Annotated[int, bounded_integer(-2, 1000)] = Field(
        default=0,
        title=_("Retries"),
        description=_(
            "Retries after failures of the job itself; lost nodes do not count. -1: retry any failure, -2: retry always."
        ),
        json_schema_extra=form(
            "basics",
            professional=True,
            minimum=-2,
            width="third",
            help=_("After failures of the job itself. -1: after any failure."),
        ),
    )
    time_limit: Duration | None = Field(
        default=None,
        title=_("Time limit"),
        description=_(
            "Longest run time: seconds, 90m, 2h30m, 02:30:00 or 1-02:00:00; absent: the namespace's default."
        ),
        json_schema_extra=form(
            "basics", help=_("For example 90m, 2h30m or 1-12:00:00."), placeholder="2h30m"
        ),
    )
    grace_period: Duration | None = Field(
        default=None,
        title=_("Time to save"),
        description=_(
            "Time between SIGTERM and SIGKILL when the job is stopped, at most 1h; before the time limit, part of it. "
            "Absent: the cluster's, usually 30 s."
        ),
        json_schema_extra=form(
            "basics",
            professional=True,
            placeholder="30s",
            width="third",
            help=_("After SIGTERM, before the tasks are killed."),
        ),
    )
    estimated_duration: Duration | None = Field(
        default=None,
        title=_("Estimated duration"),
        description=_("Estimated run time; the page computes the expected end from it."),
        json_schema_extra=form("basics", professional=True, placeholder="1h", width="third"),
    )
    placement: Placement = Field(
        default="auto",
        title=_("Placement of roles"),
        description=_(
            "pack: roles share nodes; separate: no two roles on one node; auto: any placement."
        ),
        json_schema_extra=form(
            "basics",
            professional=True,
            width="third",
            choices={
                "auto": _("Any nodes"),
                "pack": _("Roles share nodes"),
                "separate": _("Roles on different nodes"),
            },
        ),
    )
    framework: Framework | None = Field(
        default=None,
        title=_("Framework and strategy"),
        description=_("Training framework and strategy; their variables are set in each task."),
        json_schema_extra=form("framework", widget="preset"),
    )
    job_ssh: Annotated[Flag, Field(alias="jobssh")] = Field(
        default=False,
        title=_("SSH between tasks"),
        description=_(
            "Whether tasks can reach each other with ssh by their names (ssh worker-0); only tasks of this job can. "
            "horovodrun and mpirun need it for several nodes; their strategies switch it on."
        ),
        json_schema_extra=form("basics", professional=True, width="full"),
    )
    task_roles: tuple[TaskRole, ...] = Field(
        json_schema_extra={"minItems": 1, "maxItems": MAX_ROLES},
        description=_("The roles, at least one."),
    )
    job_envs: dict[EnvName, EnvValue] = Field(
        default_factory=dict,
        title=_("Environment variables of all tasks"),
        description=_(
            "Environment variables of every task. isDebug: true keeps a failed task and its node until you release it."
        ),
        json_schema_extra=form("settings", professional=True, add=_("Add a variable")),
    )
    slurm_variables: Flag = Field(
        default=False,
        title=_("Slurm's variables in tasks"),
        description=_(
            "Whether tasks get Slurm's own variables (SLURM_JOB_ID and others); if not, they get them as SLUICE_SLURM_*. "
            "MPI jobs started by srun always get them."
        ),
        json_schema_extra=form("settings", professional=True),
    )
    mounts: tuple[Mount, ...] = Field(
        default=(),
        title=_("Storage mounts"),
        description=_("Additional directories of the cluster, mounted in every task."),
        json_schema_extra=form("directories", professional=True, add=_("Add a mount")),
    )
    code: Code | None = Field(
        default=None,
        title=_("Code"),
        description=_("Source of the code, if not codeDir."),
        json_schema_extra=form("code", widget="code"),
    )
    services: tuple[Service, ...] = Field(
        default=(),
        description=_(
            "Services that tasks provide to their owner: ssh, tensorboard, jupyter, vnc, http. Saved, not active yet."
        ),
    )
    metrics: Metrics | None = Field(
        default=None,
        description=_("Source of the job's metrics. Saved, not active yet."),
    )
    alerts: Alerts | None = Field(
        default=None,
        title=_("Alerts"),
        description=_("Alerts about the job. Saved, not active yet."),
        json_schema_extra=form(
            "settings",
            professional=True,
            help=_("Saved with the job; not active yet."),
        ),
    )
    labels: dict[Line, Line] = Field(
        default_factory=dict,
        title=_("Labels"),
        description=_("Key-value pairs to find the job by."),
        json_schema_extra=form("settings", professional=True, add=_("Add a label")),
    )
    secrets: tuple[EnvName, ...] = Field(
        default=(),
        description=_(
            "Names of secret variables: their values are given at submission and never stored in this file."
        ),
    )
    imported_from: Annotated[str, choice("", "openpai-v2", "ffdl", "octopus")] = Field(
        default="",
        description=_(
            "Format that the job was imported from; it decides the form of some variables."
        ),
    )
    extras: dict[Line, FreeValue] = Field(
        default_factory=dict,
        description=_("Anything else; stored with the job and otherwise ignored."),
    )

    @model_validator(mode="before")
    @classmethod
    def _accept_virtual_cluster(cls, value: Any) -> Any:
        """Rename virtualCluster to namespace, and drop an empty value, which means the default namespace.

        If both keys have different values, both stay, and a rule between fields reports them.
        """
        if not isinstance(value, Mapping):
            return value
        document = {
            k: v for k, v in value.items() if k not in _NAMESPACE_KEYS or v not in (None, "")
        }
        names = [document[key] for key in _NAMESPACE_KEYS if key in document]
        if names and names.count(names[0]) == len(names):
            document.pop("virtualCluster", None)
            document["namespace"] = names[0]
        return document

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        # `validation` lists all violations; here the first suffices to refuse the job.
        violation = next(find_rule_violations(self), None)
        if violation is not None:
            text = f"{violation.loc}: {violation.message}"
            raise validation_error(RULES_CODE, _("%(text)s", text=text))
        return self

    @property
    def is_debug(self) -> bool:
        return str(self.job_envs.get("isDebug", False)).lower() == "true"

    @property
    def job_env_texts(self) -> dict[str, str]:
        return {name: format_env_value(value) for name, value in self.job_envs.items()}

    @property
    def task_count(self) -> int:
        return sum(role.task_number for role in self.task_roles)

    def image_of(self, role: TaskRole) -> str:
        return role.image or self.image

    def gpu_type_of(self, role: TaskRole) -> str:
        return role.gpu_type or self.gpu_type
