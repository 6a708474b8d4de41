"""Renders roles.sh and secrets.sh: the data of a job and its roles that task.sh needs, in bash syntax.

roles.sh contains settings, ports, mounts, environment variables and commands; secrets.sh the values of secrets and registry
logins. They consist of assignments and of calls of functions in shell/task.sh, with quoted words. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from core.cancellation import checked
from jobs.jobfile import TaskRole
from jobs.jobfile.frameworks import assign_roles
from jobs.plan import RolePlan
from jobs.script.context import RenderContext
from jobs.script.expressions import (
    CurrentHost,
    CurrentIndex,
    CurrentPort,
    CurrentPorts,
    Expression,
    ExpressionPart,
    HostList,
    HostSlots,
    LiteralText,
    TaskHost,
    TaskPort,
    Variable,
    VariableFamily,
)
from jobs.script.framework_variables import find_framework_server
from jobs.script.host_names import decide_ssh_mode, list_host_name_prefixes
from jobs.script.quoting import quote, quote_path, render_array, render_case_function
from jobs.script.task_state import ScriptExit, render_exit_codes
from jobs.script.variables import build_runtime_variables, build_static_variables, list_task_ports

_TASK_EXIT_CODES = (
    ScriptExit.START_FAILED,
    ScriptExit.IMAGE_FAILED,
    ScriptExit.PORT_TAKEN,
    ScriptExit.SSH_FAILED,
    ScriptExit.STOPPED,
)
_STRICT_SHELL_LINES = (
    "set -o errexit -o nounset\n(set -o pipefail) 2>/dev/null && set -o pipefail\n"
)


def render_secrets(context: RenderContext, secrets: Mapping[str, str]) -> str:
    """Render secrets.sh, which batch.sh and task.sh read beside roles.sh; "" if the job has no secrets."""
    if not has_secrets(context, secrets):
        return ""
    lines = [
        "# Values of secrets, for batch.sh and task.sh. Removed when the job has ended.",
        "# shellcheck shell=bash disable=SC2016,SC2034",
        *_render_logins(context.logins),
        "secret_variables() {",
        "  :",
        *(f"  variable {name} {quote(value)}" for name, value in secrets.items()),
        "}",
    ]
    return "\n".join(lines) + "\n"


def has_secrets(context: RenderContext, secrets: Mapping[str, str]) -> bool:
    return bool(secrets or context.logins)


def render_role_data(context: RenderContext, *, user: str, secrets: Mapping[str, str]) -> str:
    options, paths = context.options, context.paths
    assignment = assign_roles(context.spec)
    lines = [
        f"# Data of job {context.spec.job_name}, attempt {paths.attempt}, for task.sh.",
        "# shellcheck shell=bash disable=SC2016,SC2034  # text in single quotes is data; task.sh uses the variables",
        "",
        f"work_dir={quote_path(context.dirs.work)}",
        f"grace_s={context.grace_s} # between SIGTERM and SIGKILL",
        f"is_debug={int(context.spec.is_debug)}",
        f"slurm_variables={int(context.spec.slurm_variables)} # 1: tasks get Slurm's variables under their own names",
        f"task_count={context.spec.task_count} # of all roles",
        f"port_low={options.port_low} port_high={options.port_high} ports_per_task={_count_ports_per_task(context)}",
        f"runtime={options.runtime} runtime_program={quote_path(context.runtime_program)} gpu_option={quote(options.gpu_option)}",
        f"ssh_mode={decide_ssh_mode(context.spec)} # SSH between tasks",
        render_exit_codes(*_TASK_EXIT_CODES),
        "mounts=( # source, target, rw or ro",
        *(
            f"  {quote_path(b.source)} {quote_path(b.target)} {'ro' if b.read_only else 'rw'}"
            for b in context.dirs.binds
        ),
        ")",
        *_render_host_names(context),
        f"has_secrets={int(has_secrets(context, secrets))} # 1: secrets.sh has their values",
        "",
        *render_case_function("role_settings", _list_role_settings(context)),
        "",
        "# Environment variables. If a name occurs twice, the last value counts. task.sh explains the parts of a template.",
        *_render_variables(context, user=user, has_secrets=has_secrets(context, secrets)),
        "",
        *render_case_function(
            "role_commands",
            (
                (index, _render_commands(role, find_framework_server(assignment, role)))
                for index, role in enumerate(checked(context.spec.task_roles))
            ),
        ),
    ]
    return "\n".join(lines) + "\n"


def _render_host_names(context: RenderContext) -> list[str]:
    if decide_ssh_mode(context.spec) == "off" and context.spec.task_count > 1:
        return []  # only batch.sh needs them
    names = zip(context.spec.task_roles, list_host_name_prefixes(context.spec), strict=True)
    entries = (f"[{quote(role.name)}]={quote(' '.join(prefixes))}" for role, prefixes in names)
    return [f"declare -A host_names=({' '.join(entries)}) # host names of tasks, without the index"]


def _render_logins(logins: Mapping[str, Mapping[str, str]]) -> list[str]:
    if not logins:
        return []
    lines = (
        f"  {quote(source)} {quote(login.get('username', ''))} {quote(login.get('password', ''))}"
        for source, login in logins.items()
    )
    return [
        "image_logins=( # image, user name, password; batch.sh fetches images with them",
        *lines,
        ")",
    ]


# Settings


def _count_ports_per_task(context: RenderContext) -> int:
    """Count the ports of the cluster's port range in which a task begins its search for free ports.

    The count is four times the ports that a task needs. If the range is too small for that, it is the ports that
    a task needs.
    """
    requested = max(
        sum(p.port_number for p in list_task_ports(r) if not p.begin_at)
        for r in context.spec.task_roles
    )
    range_size = context.options.port_high - context.options.port_low + 1
    if requested * 4 * context.spec.task_count <= range_size:
        return requested * 4
    return max(1, requested)


def _list_role_settings(context: RenderContext) -> Iterable[tuple[int, list[str]]]:
    first_task = 0
    for role in context.plan.roles:
        yield role.index, _render_settings(context, first_task, role)
        first_task += role.tasks


def _render_settings(context: RenderContext, first_task: int, role: RolePlan) -> list[str]:
    ports = list_task_ports(context.spec.task_roles[role.index])
    return [
        f"role_name={quote(role.name)} role_tasks={role.tasks} role_gpus={role.gpus} shm_mib={context.shm_mib_of(role)} first_task={first_task}",
        f"srun_mpi={int(role.index in context.plan.mpi_roles)} # 1: srun starts the role's MPI processes",
        f"image_file={quote_path(context.images[role.index].path)}",
        render_array("port_labels", (quote(port.label) for port in ports)),
        render_array("port_begins", (str(port.begin_at) for port in ports), "0: any free port"),
        render_array("port_counts", (str(port.port_number) for port in ports)),
    ]


# Environment variables


def _render_variables(context: RenderContext, *, user: str, has_secrets: bool) -> list[str]:
    spec = context.spec
    runtime = build_runtime_variables(spec)
    static = build_static_variables(
        spec,
        user=user,
        fs_uri=context.options.fs_uri,
        training_id=context.paths.job_uuid,
    )
    directories = {name: quote_path(value) for name, value in context.dirs.variables.items()}
    shared = {name: quote(value) for name, value in static.shared.items()}
    cases = [
        (
            index,
            [
                *(
                    f"variable {name} {quote(value)}"
                    for name, value in static.by_role[role.name].items()
                    if name not in directories
                ),
                *(_render_template(variable) for variable in runtime.by_role[role.name]),
            ],
        )
        for index, role in enumerate(checked(spec.task_roles))
    ]
    before = [
        *(_render_template(variable) for variable in runtime.shared),
        *(_render_family(family) for family in runtime.families),
        *(["secret_variables"] if has_secrets else []),
        *(f"variable {name} {word}" for name, word in {**shared, **directories}.items()),
    ]
    return render_case_function("role_variables", cases, before=before)


def _render_template(variable: Variable) -> str:
    return f"template {variable.name} {render_parts(variable.value)}"


def _render_family(family: VariableFamily) -> str:
    words = (quote(family.role), quote(family.prefix), quote(family.suffix))
    return f"family {' '.join(words)} {render_parts(family.value)}"


def render_parts(expression: Expression) -> str:
    """Render an expression as the arguments of `expand` in shell/task.sh. Adjacent texts become one argument."""
    words: list[str] = []
    for part in expression:
        if isinstance(part, LiteralText) and words and words[-1].startswith("="):
            words[-1] += part.text
        else:
            words.append(_encode_part(part))
    return " ".join(quote(word) for word in words)


def _encode_part(part: ExpressionPart) -> str:
    """Encode one part of an expression as an argument of `expand` in shell/task.sh."""
    match part:
        case LiteralText(text):
            return f"={text}"
        case TaskHost(role, index):
            return f"host/{role}/{index}"
        case TaskPort(role, index, label):
            return f"port/{role}/{index}/{label}"
        case HostList(role, label, before, after):
            return f"hosts/{role}/{label}/{before}/{after}"
        case HostSlots(roles):
            return "/".join(("slots", *(f"{role}/{slots}" for role, slots in roles)))
        case CurrentIndex(offset):
            return f"index/{offset}"
        case CurrentHost():
            return "own_host"
        case CurrentPort(label):
            return f"own_port/{label}"
        case CurrentPorts(label):
            return f"own_ports/{label}"


# Commands


def _render_commands(role: TaskRole, server: tuple[str, bool]) -> list[str]:
    command = (_STRICT_SHELL_LINES if role.strict_shell else "") + role.command.rstrip()
    arguments = (quote(f"--{parameter.key}={parameter.value}") for parameter in role.parameters)
    command = " ".join((command, *arguments))
    texts = {"pre_command": "", "command": command, "post_command": ""}
    for name, commands in (
        ("pre_command", role.pre_commands),
        ("post_command", role.post_commands),
    ):
        if commands:
            texts[name] = "set -o errexit\n" + "\n".join(commands)
    return [
        *(f"{name}={quote(text)}" for name, text in texts.items()),
        f"framework_server={quote(server[0])} starts_server={int(server[1])}",
    ]
