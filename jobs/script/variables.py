"""The environment variables that every task gets: constants, and expressions for values known at run time.

The names are those of OpenPAI v1 and v2, FfDL and Octopus, because existing jobs use them. The variables of
training frameworks are in `framework_variables`. task.sh adds the variables that Slurm sets itself
(CUDA_VISIBLE_DEVICES and others). Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jobs.jobfile.fields import RESERVED_PREFIXES, is_identifier, to_identifier
from jobs.jobfile.model import JobSpec, TaskRole
from jobs.jobfile.sections import Port
from jobs.script.expressions import (
    CurrentHost,
    CurrentIndex,
    CurrentPort,
    CurrentPorts,
    Expression,
    HostList,
    LiteralText,
    Variable,
    VariableFamily,
)
from jobs.script.framework_variables import build_framework_variables


def list_task_ports(role: TaskRole) -> tuple[Port, ...]:
    """List all ports of a task of this role: http and ssh, which every task has, and those in the portList."""
    labels = {port.label for port in role.port_list}
    implicit_ports = (Port(label=label) for label in ("http", "ssh") if label not in labels)
    return (*implicit_ports, *role.port_list)


def variable_name_forms(name: str) -> tuple[str, ...]:
    """List the forms of a role's or port's name that are used in names of variables.

    There is always a form with only lower-case letters and digits. If the name itself can be part of a
    variable's name, it is used too.
    """
    plain_form = to_identifier(name)
    return (name, plain_form) if is_identifier(name) and name != plain_form else (plain_form,)


def _format_completion_count(spec: JobSpec, count: int | None) -> str:
    # If the job file does not set a completion rule, OpenPAI v1 sets the variable to an empty string, v2 to -1.
    unset = "-1" if spec.imported_from == "openpai-v2" else ""
    return unset if count is None else str(count)


def _format_resources(role: TaskRole) -> str:
    return f"{role.gpu_number},{role.cpu_number},{role.memory_mb},{role.shm_mb}"


def build_job_variables(
    spec: JobSpec, *, user: str, fs_uri: str = "", training_id: str = ""
) -> dict[str, str]:
    """Build the variables that have the same value in every task of the job and are known before it runs.

    Those whose values are directories are in `build_directory_variables`.
    """
    roles = ",".join(role.name for role in spec.task_roles)
    role_count, task_count = str(len(spec.task_roles)), str(spec.task_count)
    values = {
        "PAI_JOB_NAME": spec.job_name,
        "PAI_FRAMEWORK_NAME": spec.job_name,
        "PAI_USER_NAME": user,
        "PAI_USERNAME": user,
        "PAI_DEFAULT_FS_URI": fs_uri,
        "PAI_VIRTUAL_CLUSTER": spec.namespace,
        "PAI_TASK_ROLE_COUNT": role_count,
        "PAI_TASK_ROLES_NUM": role_count,
        "PAI_JOB_TASK_ROLE_COUNT": role_count,
        "PAI_TASK_ROLE_LIST": roles,
        "PAI_JOB_TASK_ROLE_LIST": roles,
        "PAI_TASKS_NUM": task_count,
        "PAI_JOB_TASK_COUNT": task_count,
        "PAI_TASK_ROLE_INSTANCES": ",".join(
            f"{role.name}:{index}" for role in spec.task_roles for index in range(role.task_number)
        ),
        "TRAINING_ID": training_id or spec.job_name,
    }
    for position, role in enumerate(spec.task_roles):
        for form in variable_name_forms(role.name):
            values[f"PAI_TASK_ROLE_TASK_COUNT_{form}"] = str(role.task_number)
            values[f"PAI_RESOURCE_{form}"] = _format_resources(role)
            values[f"PAI_MIN_FAILED_TASK_COUNT_{form}"] = _format_completion_count(
                spec, role.min_failed_task_count
            )
            values[f"PAI_MIN_SUCCEEDED_TASK_COUNT_{form}"] = _format_completion_count(
                spec, role.min_succeeded_task_count
            )
        for form in _octopus_name_forms(position, role):
            values[f"VC_{form}_NUM"] = str(role.task_number)
    return values


def _octopus_name_forms(position: int, role: TaskRole) -> tuple[str, ...]:
    """List the forms of a role in Octopus' variables: its number (TASK0), as in Octopus, and its name (PS_SERVER)."""
    name = "".join(c if c.isalnum() and c.isascii() else "_" for c in role.name).upper()
    return tuple(dict.fromkeys((f"TASK{position}", name)))


def _build_role_variables(spec: JobSpec, position: int, role: TaskRole) -> dict[str, str]:
    """Build the variables that have the same value in every task of one role and are known before the job runs."""
    number = str(role.task_number)
    return {
        "PAI_CURRENT_TASK_ROLE_NAME": role.name,
        "PAI_TASK_ROLE_NAME": role.name,
        "PAI_TASK_ROLE_INDEX": str(position),
        "PAI_TASK_ROLE_NUM": number,
        "PAI_CURRENT_TASK_ROLE_TASK_COUNT": number,
        "PAI_CURRENT_TASK_ROLE_CPU_COUNT": str(role.cpu_number),
        "PAI_CURRENT_TASK_ROLE_MEM_MB": str(role.memory_mb),
        "PAI_CURRENT_TASK_ROLE_SHM_MB": str(role.shm_mb),
        "PAI_CURRENT_TASK_ROLE_GPU_COUNT": str(role.gpu_number),
        "PAI_CURRENT_TASK_ROLE_MIN_FAILED_TASK_COUNT": _format_completion_count(
            spec, role.min_failed_task_count
        ),
        "PAI_CURRENT_TASK_ROLE_MIN_SUCCEEDED_TASK_COUNT": _format_completion_count(
            spec, role.min_succeeded_task_count
        ),
        "PAI_TASK_CPU_NUM": str(role.cpu_number),
        "PAI_TASK_MEM_MB": str(role.memory_mb),
        "PAI_TASK_GPU_NUM": str(role.gpu_number),
        "TASKROLE_NAME": f"task{position}",
        "NUM_LEARNERS": number,
        "GPU_COUNT": str(role.gpu_number),
    }


def build_directory_variables(
    spec: JobSpec,
    *,
    data: str,
    output: str,
    code: str,
    model: str,
    work: str,
    checkpoint: str,
    attempt: str,
    fs_uri: str,
) -> dict[str, str]:
    """Build the variables whose values are the job's directories, under OpenPAI's and FfDL's names.

    FfDL's names are common words, such as DATA_DIR. A variable of FfDL that the job file sets is left out.
    MODEL_DIR is the model directory, but in FfDL it is the directory of the code (the "model definition").
    """
    ffdl_values = {
        "DATA_DIR": data,
        "MODEL_DIR": (code or work) if spec.imported_from == "ffdl" else model,
        "RESULT_DIR": output,
        "JOB_RESULT_DIR": output,
        "CHECKPOINT_DIR": checkpoint,
        "LOG_DIR": f"{attempt}/logs",
        "JOB_STATE_DIR": attempt,
    }
    names_in_job_file = set(spec.job_envs).union(*(role.env for role in spec.task_roles))
    return {
        "PAI_DATA_DIR": data,
        "PAI_OUTPUT_DIR": output,
        "PAI_CODE_DIR": code,
        "PAI_WORK_DIR": work,
        "PAI_DEFAULT_FS_URI": fs_uri,
        **{name: value for name, value in ffdl_values.items() if name not in names_in_job_file},
    }


@dataclass(frozen=True, slots=True)
class StaticVariables:
    """Variables that are known before the job runs."""

    shared: dict[str, str]  # every task gets these
    by_role: dict[
        str, dict[str, str]
    ]  # role name → variables of its tasks, which override shared ones

    def __getitem__(self, role_name: str) -> dict[str, str]:
        """Return all variables of a role's tasks."""
        return {**self.shared, **self.by_role[role_name]}


def build_static_variables(
    spec: JobSpec, *, user: str, fs_uri: str = "", training_id: str = ""
) -> StaticVariables:
    """Build all variables that are known before the job runs.

    If Sluice and the job file both set a variable, Sluice's value is used for names with a reserved prefix,
    and the job file's value for others, because names such as GPU_COUNT are common words.
    """
    sluice_values = build_job_variables(spec, user=user, fs_uri=fs_uri, training_id=training_id)
    # The names are the same for all roles.
    names_by_role = _build_role_variables(spec, 0, spec.task_roles[0]).keys()

    def select(values: dict[str, str]) -> dict[str, str]:
        """Select the job file's variables that Sluice does not set, or that may override Sluice's."""
        return {
            name: value
            for name, value in values.items()
            if not name.startswith(RESERVED_PREFIXES)
            or (name not in sluice_values and name not in names_by_role)
        }

    job_values = select(spec.job_env_texts)
    by_role = {}
    for position, role in enumerate(spec.task_roles):
        role_values = _build_role_variables(spec, position, role)
        by_role[role.name] = {
            **{name: value for name, value in role_values.items() if name not in job_values},
            **select(role.env_texts),
        }
    return StaticVariables({**sluice_values, **job_values}, by_role)


@dataclass(frozen=True, slots=True)
class RuntimeVariables:
    """Variables that depend on the hosts and ports of tasks; task.sh computes their values."""

    # Every task gets `shared` and `families`, with the same values.
    shared: tuple[Variable, ...]
    families: tuple[VariableFamily, ...]
    # Role name → variables that only tasks of this role get, including the framework's.
    by_role: dict[str, tuple[Variable, ...]]


def build_runtime_variables(spec: JobSpec) -> RuntimeVariables:
    framework_values = build_framework_variables(spec)
    return RuntimeVariables(
        shared=tuple(_build_shared_variables(spec)),
        families=tuple(family for role in spec.task_roles for family in _build_task_families(role)),
        by_role={
            role.name: (*_build_current_task_variables(role), *framework_values[role.name])
            for role in spec.task_roles
        },
    )


def _build_shared_variables(spec: JobSpec) -> Iterator[Variable]:
    for position, role in enumerate(spec.task_roles):
        with_port: Expression = (HostList(role.name, "http"),)
        for form in variable_name_forms(role.name):
            yield Variable(f"PAI_TASK_ROLE_{form}_HOST_LIST", with_port)
        for form in _octopus_name_forms(position, role):
            yield Variable(f"VC_{form}_HOSTS", (HostList(role.name),))


def _build_task_families(role: TaskRole) -> Iterator[VariableFamily]:
    for form in variable_name_forms(role.name):
        yield VariableFamily(role.name, f"PAI_HOST_IP_{form}_", "", (CurrentHost(),))
        for port in list_task_ports(role):
            for label in variable_name_forms(port.label):
                yield VariableFamily(
                    role.name, f"PAI_PORT_LIST_{form}_", f"_{label}", (CurrentPorts(port.label),)
                )
                yield VariableFamily(
                    role.name, f"PAI_{form}_", f"_{label}_PORT", (CurrentPort(port.label),)
                )


def _build_current_task_variables(role: TaskRole) -> Iterator[Variable]:
    index: Expression = (CurrentIndex(),)
    for name in (
        "PAI_CURRENT_TASK_ROLE_CURRENT_TASK_INDEX",
        "PAI_TASK_INDEX",
        "VC_TASK_INDEX",
    ):
        yield Variable(name, index)
    yield Variable("LEARNER_ID", (CurrentIndex(offset=1),))
    yield Variable("PAI_CONTAINER_ID", (LiteralText(f"{role.name}-"), CurrentIndex()))
    for name in ("PAI_CONTAINER_HOST_IP", "PAI_CURRENT_CONTAINER_IP"):
        yield Variable(name, (CurrentHost(),))
    for name in ("PAI_CONTAINER_HOST_PORT", "PAI_CURRENT_CONTAINER_PORT"):
        yield Variable(name, (CurrentPort("http"),))
    yield Variable("PAI_CONTAINER_SSH_PORT", (CurrentPort("ssh"),))
    entries: list[LiteralText | CurrentPorts] = []
    for port in list_task_ports(role):
        entries += [LiteralText(f"{port.label}:"), CurrentPorts(port.label), LiteralText(";")]
        for label in variable_name_forms(port.label):
            yield Variable(f"PAI_CONTAINER_HOST_{label}_PORT_LIST", (CurrentPorts(port.label),))
    yield Variable("PAI_CONTAINER_HOST_PORT_LIST", tuple(entries))
