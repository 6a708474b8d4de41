"""From a plan to the files of an attempt: batch script, task wrapper, variables and commands.

The same input gives the same bytes. Every string from a person passes `quote` or stands in a file of
its own; only `command` is code, and it runs as its owner. The parts that never change are the files
in jobs/shell. Pure apart from reading those once.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

from core.messages import Message, _
from jobs.jobfile import JobSpec, TaskRole
from jobs.jobfile.fields import format_duration
from jobs.plan import Group, Plan, RolePlan, describe_plan
from jobs.script.framework_variables import uses_srun_mpi
from jobs.script.images import ResolvedImage, resolve_image
from jobs.script.paths import AttemptPaths
from jobs.script.task_state import ScriptExit
from jobs.script.variable_script import PeerScript, render_role_script
from jobs.script.variables import (
    directory_variables,
    list_task_ports,
    runtime_variables,
    static_variables,
    substitute_paths,
)

Runtime = Literal["apptainer", "singularity", "enroot", "pyxis", "none"]
RUNTIMES: tuple[Runtime, ...] = ("apptainer", "singularity", "enroot", "pyxis", "none")

# Slurm sends --signal up to a minute early: a shorter job would get it at its start.
MIN_TIME_LIMIT_FOR_SIGNAL_S = 300
_PLAIN_OPTION = re.compile(r"[\w./:=,+@~&|*!()\[\]-]+")


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """What a cluster wants of its scripts."""

    runtime: Runtime = "apptainer"
    runtime_program: str = ""  # where the runtime is not on PATH under its own name
    images_dir: str = ""
    image_files: frozenset[str] = frozenset()  # the names in images_dir
    image_aliases: Mapping[str, str] = field(default_factory=dict)
    image_cache_dir: str = "~/.cache/sluice/images"
    grace_s: int = 30
    mpi: str = "pmix"
    port_low: int = 20000
    port_high: int = 32767  # below Linux' range for outgoing connections
    fs_uri: str = "~"  # PAI_DEFAULT_FS_URI; ~ is the owner's home
    requeue: bool = True
    gpu_option: Literal["--nv", "--rocm", ""] = "--nv"  # how Apptainer passes GPUs on
    site_binds: tuple[str, ...] = ()  # directories of the nodes in every container


@dataclass(frozen=True, slots=True)
class RenderedJob:
    """Files by path relative to the attempt's directory; all are text, all for the owner only."""

    batch_script: str
    task_script: str
    files: dict[str, str]


class RenderError(ValueError):
    """The runtime cannot carry something that the job says."""

    def __init__(self, message: Message) -> None:
        super().__init__(message)
        self.message = message


def quote(text: str) -> str:
    """A string as one word of sh or bash, whatever it holds."""
    return shlex.quote(text)


def quote_path(text: str) -> str:
    """Like `quote`; a leading ~ is the owner's home, which only the node knows."""
    if text == "~":
        return '"$HOME"'
    return f'"$HOME"{quote(text[1:])}' if text.startswith("~/") else quote(text)


@cache
def _read_shell_file(name: str) -> str:
    return (Path(__file__).parent / "shell" / name).read_text(encoding="utf-8")


# Directories


@dataclass(frozen=True, slots=True)
class Bind:
    source: str  # may begin with ~
    target: str
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class Directories:
    """The job's directories as they are on the cluster, and what containers see of them."""

    work: str
    variables: dict[str, str]  # may begin with ~
    binds: tuple[Bind, ...]
    required: tuple[str, ...]
    created: tuple[str, ...]


def _is_cluster_path(text: str) -> bool:
    return text.startswith("/") or text == "~" or text.startswith("~/")


def resolve_directories(
    spec: JobSpec, paths: AttemptPaths, *, options: RenderOptions
) -> Directories:
    """Of a spec whose paths are filled in (`substitute_paths`)."""
    uploaded = spec.code is not None and spec.code.selector == "codeFile"
    code = paths.code_dir if uploaded else spec.code_dir
    data, output, model = spec.data_dir, spec.output_dir, spec.model_dir
    binds = [Bind(path, path) for path in options.site_binds]
    binds += [Bind(paths.dir, paths.dir), Bind("~", "/userhome")]
    for source, alias, read_only in (
        (code, "/code", False),
        (data, "/dataset", True),
        (model, "/model", False),
        (output, "", False),
    ):
        if _is_cluster_path(source):
            binds.append(Bind(source, source, read_only))
            if alias:
                binds.append(Bind(source, alias, read_only))
    mounts = [Bind(m.source, m.target, m.read_only) for m in spec.mounts]
    unique = {bind.target: bind for bind in [*binds, *mounts]}
    work = code if _is_cluster_path(code) else f"{paths.dir}/work"
    created = tuple(d for d in (output,) if _is_cluster_path(d))
    required = [
        bind.source for bind in unique.values() if bind.source not in (paths.dir, "~", *created)
    ]
    return Directories(
        work=work,
        variables=directory_variables(
            spec,
            data=data,
            output=output,
            code=code,
            work=work,
            attempt=paths.dir,
            fs_uri=options.fs_uri,
        ),
        binds=tuple(unique.values()),
        required=tuple(dict.fromkeys(required)),
        created=created,
    )


# The batch script


def render_sbatch_line(option: str, value: object) -> str:
    """One #SBATCH line. sbatch splits lines like a shell, without expanding anything."""
    text = str(value)
    if any(ord(c) < 32 for c in text):
        raise RenderError(_("--%(option)s cannot hold control characters.", option=option))
    if not _PLAIN_OPTION.fullmatch(text):
        text = '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return f"#SBATCH --{option}={text}"


def _build_group_options(plan: Plan, group: Group) -> list[tuple[str, object]]:
    """What one allocation asks for: per task when one role has it for itself, else per node."""
    roles = plan.roles_of(group)
    gpu = f"{group.gpu_type}:{group.gpus}" if group.gpu_type else f"{group.gpus}"
    options: list[tuple[str, object]] = [("partition", group.partition)]
    if group.shared:
        options += [
            ("nodes", group.nodes),
            ("ntasks-per-node", 1),
            ("cpus-per-task", group.cpus),
            ("mem", f"{group.mem_mib}M"),
        ]
        return [*options, ("gres", f"gpu:{gpu}")] if group.gpus else options
    role = roles[0]
    if group.fixed_nodes:
        options.append(("nodes", group.nodes))
    options.append(("ntasks", role.tasks))
    if role.per_node is not None:
        options.append(("ntasks-per-node", role.per_node))
    options += [("cpus-per-task", role.cpus), ("mem-per-cpu", f"{role.mem_mib // role.cpus}M")]
    return [*options, ("gpus-per-task", gpu)] if role.gpus else options


def _render_header(
    spec: JobSpec, plan: Plan, paths: AttemptPaths, options: RenderOptions
) -> list[str]:
    common: list[tuple[str, object]] = []
    for name, value in (
        ("account", plan.account),
        ("qos", plan.qos),
        ("constraint", plan.constraint),
    ):
        if value:
            common.append((name, value))
    if plan.time_limit_s is not None:
        common.append(("time", format_duration(plan.time_limit_s)))
    common.append(("chdir", paths.dir))
    lines = [
        "#!/bin/bash",
        f"# Job {spec.job_name}, attempt {paths.attempt}: {plan.layout}.",
        *(f"# {sentence}" for sentence in describe_plan(plan).split("; ")),
        render_sbatch_line("job-name", spec.job_name),
        render_sbatch_line("output", "logs/batch.log"),
        render_sbatch_line("open-mode", "append"),
        render_sbatch_line("export", "NONE"),
        "#SBATCH --requeue" if options.requeue else "#SBATCH --no-requeue",
    ]
    if plan.time_limit_s is None or plan.time_limit_s >= MIN_TIME_LIMIT_FOR_SIGNAL_S:
        lines.append(render_sbatch_line("signal", f"B:USR1@{options.grace_s}"))
    for group in plan.groups:
        if group.index:
            lines.append("#SBATCH hetjob")
        lines += [render_sbatch_line(name, value) for name, value in common]
        lines += [
            render_sbatch_line(name, value) for name, value in _build_group_options(plan, group)
        ]
    return lines


def _build_step_options(plan: Plan, role: RolePlan, mpi: str) -> list[str]:
    group = plan.groups[role.group]
    arguments = [f"--het-group={group.index}"] if plan.layout == "het" else []
    arguments += ["--exact", f"--ntasks={role.tasks}", f"--cpus-per-task={role.cpus}"]
    if role.per_node is not None:
        nodes = -(-role.tasks // role.per_node)
        even = nodes * role.per_node == role.tasks
        # srun takes --ntasks-per-node only where it comes out even; going round spreads as evenly as can be.
        spread = f"--ntasks-per-node={role.per_node}" if even else "--distribution=cyclic"
        arguments += [f"--nodes={nodes}", spread]
    if group.shared:
        arguments.append(f"--mem={(role.per_node or 1) * role.mem_mib}M")
    else:
        arguments.append(f"--mem-per-cpu={role.mem_mib // role.cpus}M")
    # Slurm 22.05: with a GPU type here tasks see no GPU at all, and without --gpu-bind all of the step's.
    arguments += (
        [f"--gpus-per-task={role.gpus}", f"--gpu-bind=per_task:{role.gpus}"]
        if role.gpus
        else ["--gres=none"]
    )
    arguments.append(f"--mpi={mpi}")
    return arguments


def _render_array(name: str, arguments: Iterable[str], comment: str = "") -> str:
    return f"{name}=({' '.join(arguments)})" + (f" # {comment}" if comment else "")


def _render_case_function(name: str, cases: Iterable[tuple[int, list[str]]]) -> list[str]:
    lines = [f"{name}() {{", "  case $1 in"]
    for number, body in cases:
        lines += [f"    {number})", *(f"      {line}" for line in body), "      ;;"]
    return [*lines, "  esac", "}"]


def _completion_rules(role: TaskRole) -> tuple[int, int, int]:
    """(minFailed, minSucceeded, main): 0 switches a rule off. A main role decides by itself."""
    failed = role.min_failed_task_count or 0
    succeeded = role.min_succeeded_task_count or 0
    if role.is_main:
        return failed or 1, succeeded or role.task_number, 1
    return failed, succeeded, 0


_BATCH_EXITS = (
    ScriptExit.START_FAILED,
    ScriptExit.IMAGE_MISSING,
    ScriptExit.IMAGE_FAILED,
    ScriptExit.MOUNT_MISSING,
    ScriptExit.TASK_LOST,
    ScriptExit.LAUNCH_FAILED,
    ScriptExit.STOPPED,
)


def _render_exit_codes(*codes: ScriptExit) -> str:
    return " ".join(f"exit_{code.name.lower()}={code.value}" for code in codes)


@dataclass(frozen=True, slots=True)
class _RenderContext:
    """Everything that the parts of one rendering share."""

    spec: JobSpec
    plan: Plan
    paths: AttemptPaths
    options: RenderOptions
    dirs: Directories
    images: tuple[ResolvedImage, ...]
    logins: Mapping[str, str] = field(default_factory=dict)  # source of an image → file in env/

    @property
    def program(self) -> str:
        return quote_path(self.options.runtime_program or self.options.runtime)


def _render_fetch_image(context: _RenderContext) -> list[str]:
    """fetch_image SOURCE FILE: under a lock, to a name of its own, then renamed."""
    enroot = context.options.runtime in ("enroot", "pyxis")
    program = quote("enroot") if context.options.runtime == "pyxis" else context.program
    fetch = (
        f'{program} import --output "$2.$SLURM_JOB_ID" "$1"'
        if enroot
        else f'{program} pull "$2.$SLURM_JOB_ID" "$1"'
    )
    lines = [
        "# fetch_image SOURCE FILE: once, whoever comes first.",
        "fetch_image() {",
        '  mkdir -p "${2%/*}"',
        "  (",
    ]
    if context.spec.auth_file and not enroot:
        # OpenPAI's authFile: registry, user name and password, one per line.
        auth = quote_path(context.spec.auth_file)
        lines += [
            f"    {{ read -r _ && read -r user && read -r password; }} <{auth} || exit",
            "    export APPTAINER_DOCKER_USERNAME=$user APPTAINER_DOCKER_PASSWORD=$password",
            "    export SINGULARITY_DOCKER_USERNAME=$user SINGULARITY_DOCKER_PASSWORD=$password",
        ]
    if context.logins:
        lines += ["    case $1 in"]
        for source, name in context.logins.items():
            lines += [
                f"      {quote(source)})",
                "        # shellcheck source=/dev/null",
                f'        . "$attempt_dir/env/{name}" || exit',
                "        ;;",
            ]
        lines += ["    esac"]
    return [
        *lines,
        "    flock 9",
        f'    [[ -e $2 ]] || {{ {fetch} && mv "$2.$SLURM_JOB_ID" "$2"; }}',
        '  ) 9>"$2.lock"',
        "}",
    ]


def _render_batch_script(context: _RenderContext, peers: PeerScript) -> str:
    spec, plan = context.spec, context.plan
    rules = [_completion_rules(role) for role in spec.task_roles]
    mpi = context.options.mpi if uses_srun_mpi(spec) else "none"
    images = context.images
    needs_fetch = any(image.source for image in images)
    pyxis = context.options.runtime == "pyxis"

    def step(role: RolePlan) -> list[str]:
        arguments = _build_step_options(plan, role, mpi)
        lines = [f"options=({' '.join(arguments)})"]
        if pyxis:
            lines += _render_pyxis(context, images[role.index])
        return lines

    lines = [
        *_render_header(spec, plan, context.paths, context.options),
        "# shellcheck disable=SC2016  # what stands in single quotes is data",
        "",
        "# ---- What the job is, in the order of the job file's roles " + "-" * 34,
        f"attempt_dir={quote(context.paths.dir)}",
        f"grace_s={context.options.grace_s} # between SIGTERM and SIGKILL",
        _render_array("role_names", (quote(role.name) for role in plan.roles)),
        _render_array("role_tasks", (str(role.tasks) for role in plan.roles)),
        _render_array(
            "role_groups", (str(role.group) for role in plan.roles), "components of a het job"
        ),
        _render_array(
            "min_failed", (str(r[0]) for r in rules), "so many failed tasks fail the job; 0: never"
        ),
        _render_array(
            "min_succeeded",
            (str(r[1]) for r in rules),
            "so many succeeded ones complete it; 0: all end first",
        ),
        _render_array("main_role", (str(r[2]) for r in rules), "its end is the job's end"),
        _render_array("image_files", (quote_path(i.path) if i.path else "''" for i in images)),
        _render_array("image_sources", (quote(i.source) for i in images)),
        _render_array("created_dirs", (quote_path(d) for d in context.dirs.created)),
        _render_array("required_dirs", (quote_path(d) for d in context.dirs.required)),
        _render_exit_codes(*_BATCH_EXITS),
        "",
        *(["joined() { local IFS=,; printf '%s' \"$*\"; }", ""] if pyxis else []),
        "# step_options ROLE: what the role's srun asks for.",
        *_render_case_function("step_options", ((role.index, step(role)) for role in plan.roles)),
        "",
        *(
            _render_fetch_image(context)
            if needs_fetch
            else ["fetch_image() { :; } # every image is a file"]
        ),
        "",
        *peers.lines,
        "",
        _read_shell_file("batch.sh"),
    ]
    return "\n".join(lines)


def _render_login_file(login: Mapping[str, str]) -> str:
    """For `fetch_image` alone: tasks never see it."""
    pairs = [(part.upper(), quote(login.get(part, ""))) for part in ("username", "password")]
    return (
        "# shellcheck shell=bash disable=SC2016  # what stands in single quotes is data\n"
        + "".join(
            f"export {program}_DOCKER_{name}={value}\n"
            for program in ("APPTAINER", "SINGULARITY")
            for name, value in pairs
        )
    )


# The task wrapper: one way to start a container per runtime


def _render_binds(binds: Iterable[Bind], flag: str, read_only: str) -> list[str]:
    arguments = []
    for bind in binds:
        suffix = read_only if bind.read_only else ""
        arguments.append(f"{flag} {quote_path(bind.source)}:{quote_path(bind.target)}{suffix}")
    return arguments


def _render_apptainer(context: _RenderContext) -> list[str]:
    # No --env: apptainer evaluates such values in a shell. enter.sh sets the variables instead.
    return [
        f"argv=({context.program} -s exec --cleanenv)",
        *(
            [f"((role_gpus)) && argv+=({context.options.gpu_option})"]
            if context.options.gpu_option
            else []
        ),
        *(
            f"argv+=({arguments})"
            for arguments in _render_binds(context.dirs.binds, "--bind", ":ro")
        ),
        'argv+=("$image_file")',
    ]


def _check_enroot_paths(binds: Iterable[Bind]) -> None:
    """Enroot and pyxis write mounts into an fstab: no blanks, and ${…} would be replaced."""
    for bind in binds:
        for path in (bind.source, bind.target):
            if re.search(r"[\s\\#$,:]", path):
                raise RenderError(
                    _(
                        "This cluster's container runtime cannot mount the path %(path)r.",
                        path=path,
                    )
                )


def _render_enroot(context: _RenderContext) -> list[str]:
    _check_enroot_paths(context.dirs.binds)
    binds = [
        f'argv+=(--mount {quote_path(b.source)}:{quote_path(b.target)}:"${"ro" if b.read_only else "rw"}")'
        for b in context.dirs.binds
    ]
    return [
        "# Named by job, role and task: nodes may share enroot's data directory.",
        "local container=sluice-$SLURM_JOB_ID-$role-$index-$incarnation",
        "export ENROOT_RUNTIME_PATH=${TMPDIR:-/tmp}/enroot-$UID-$SLURM_JOB_ID",
        'mkdir -p "$ENROOT_RUNTIME_PATH"',
        f'{context.program} create --name "$container" "$image_file" >>"$log" 2>&1 || finish_task "$exit_image_failed" image_failed',
        f"trap '{context.program} remove --force \"sluice-$SLURM_JOB_ID-$role-$index-$incarnation\" >/dev/null 2>&1' EXIT",
        "local rw=none:x-create=auto,rbind,rw ro=none:x-create=auto,rbind,ro",
        f"argv=({context.program} start --rw)",
        *binds,
        '((shm_mib)) && argv+=(--mount "tmpfs:/dev/shm:tmpfs:x-create=dir,size=${shm_mib}m")',
        'argv+=("$container")',
    ]


def _render_pyxis(context: _RenderContext, image: ResolvedImage) -> list[str]:
    _check_enroot_paths(context.dirs.binds)
    mounts = (
        f"{quote_path(b.source)}:{quote_path(b.target)}{':ro' if b.read_only else ''}"
        for b in context.dirs.binds
    )
    return [
        f"local mounts=({' '.join(mounts)})",
        f"options+=(--container-image={quote_path(image.path)})",
        'options+=(--container-mounts="$(joined "${mounts[@]}")")',
        f"options+=(--container-workdir={quote(context.paths.dir)} --container-mount-home --container-writable)",
    ]


_CONTAINER_RENDERERS: Mapping[str, Callable[[_RenderContext], list[str]]] = {
    "apptainer": _render_apptainer,
    "singularity": _render_apptainer,
    "enroot": _render_enroot,
    "pyxis": lambda context: [": # srun has started this script in the container already"],
    "none": lambda context: [": # no container: the task runs on the node itself"],
}


def _ports_per_task(context: _RenderContext) -> int:
    """How much of the port range each task has for itself: with room to step over taken ports."""
    requested = max(
        sum(p.port_number for p in list_task_ports(r) if not p.begin_at)
        for r in context.spec.task_roles
    )
    range_size = context.options.port_high - context.options.port_low + 1
    return (
        requested * 4
        if requested * 4 * context.spec.task_count <= range_size
        else max(1, requested)
    )


def _render_role_settings(context: _RenderContext, first_task: int, role: RolePlan) -> list[str]:
    ports = list_task_ports(context.spec.task_roles[role.index])
    return [
        f"role_name={quote(role.name)} role_gpus={role.gpus} shm_mib={role.shm_mib} first_task={first_task}",
        f"image_file={quote_path(context.images[role.index].path)}",
        _render_array("port_labels", (quote(port.label) for port in ports)),
        _render_array("port_begins", (str(port.begin_at) for port in ports), "0: any free port"),
        _render_array("port_counts", (str(port.port_number) for port in ports)),
    ]


def _render_task_script(context: _RenderContext) -> str:
    cases, first_task_index = [], 0
    for role in context.plan.roles:
        cases.append((role.index, _render_role_settings(context, first_task_index, role)))
        first_task_index += role.tasks
    lines = [
        "#!/bin/bash",
        f"# One task of job {context.spec.job_name}. Usage, under srun: task.sh ROLE RUN_DIR",
        "# shellcheck disable=SC2016,SC2034  # data in single quotes; settings that not every runtime uses",
        "",
        f"attempt_dir={quote(context.paths.dir)}",
        f"work_dir={quote_path(context.dirs.work)}",
        f"grace_s={context.options.grace_s} # between SIGTERM and SIGKILL",
        f"is_debug={int(context.spec.is_debug)}",
        f"port_low={context.options.port_low} port_high={context.options.port_high} ports_per_task={_ports_per_task(context)}",
        _render_exit_codes(ScriptExit.IMAGE_FAILED, ScriptExit.PORT_TAKEN, ScriptExit.STOPPED),
        "",
        *_render_case_function("role_settings", cases),
        "",
        f"# container_argv: what stands before enter.sh; runtime {context.options.runtime}.",
        "container_argv() {",
        *(f"  {line}" for line in _CONTAINER_RENDERERS[context.options.runtime](context)),
        "}",
        "",
        _read_shell_file("task.sh"),
    ]
    return "\n".join(lines)


# Commands

_STRICT_MODE = "set -o errexit -o nounset\n(set -o pipefail) 2>/dev/null && set -o pipefail\n"


def _render_command_files(role: TaskRole, index: int) -> dict[str, str]:
    command = role.command.rstrip()
    for parameter in role.parameters:
        command += " " + quote(f"--{parameter.key}={parameter.value}")
    files = {
        f"command/{index}.command.sh": (_STRICT_MODE if role.strict_shell else "") + command + "\n"
    }
    for part, commands in (("pre", role.pre_commands), ("post", role.post_commands)):
        if commands:
            files[f"command/{index}.{part}.sh"] = "set -o errexit\n" + "\n".join(commands) + "\n"
    return files


def _resolve_role_image(
    spec: JobSpec, role: TaskRole, default: str, options: RenderOptions
) -> ResolvedImage:
    if options.runtime == "none":
        return ResolvedImage("")
    name = spec.image_of(role) or default
    if not name:
        raise RenderError(
            _(
                "Role %(name)s names no container image, and there is no default one.",
                name=role.name,
            )
        )
    return resolve_image(
        name,
        runtime=options.runtime,
        images_dir=options.images_dir,
        files=options.image_files,
        aliases=options.image_aliases,
        cache_dir=options.image_cache_dir,
    )


def render_files(
    plan: Plan,
    spec: JobSpec,
    paths: AttemptPaths,
    *,
    user: str,
    options: RenderOptions | None = None,
    default_image: str = "",
    secrets: Mapping[str, str] | None = None,
    image_logins: Mapping[str, Mapping[str, str]] | None = None,
    job_name: str = "",
) -> RenderedJob:
    """The files of an attempt. `secrets` are the values of the variables that the job file only names;
    `image_logins` are for registries, by the image's name in the job file."""
    options = options or RenderOptions()
    spec = substitute_paths(spec, user=user, fs_uri=options.fs_uri)
    dirs = resolve_directories(spec, paths, options=options)
    images = tuple(
        _resolve_role_image(spec, role, default_image, options) for role in spec.task_roles
    )
    logins = {
        image.source: (image_logins or {})[spec.image_of(role)]
        for role, image in zip(spec.task_roles, images, strict=True)
        if spec.image_of(role) in (image_logins or {}) and image.source.startswith("docker://")
    }
    login_files = {source: f"login-{number}.sh" for number, source in enumerate(logins)}
    context = _RenderContext(spec, plan, paths, options, dirs, images, login_files)
    variables = runtime_variables(spec)
    labels = {role.name: [port.label for port in list_task_ports(role)] for role in spec.task_roles}
    peers = PeerScript.build(variables, labels, quote)
    static = static_variables(
        spec, user=user, job_name=job_name, fs_uri=options.fs_uri, training_id=paths.job_uuid
    )
    batch, task = _render_batch_script(context, peers), _render_task_script(context)
    files = {"batch.sh": batch, "task.sh": task, "enter.sh": _read_shell_file("enter.sh")}
    files |= {f"env/{login_files[source]}": _render_login_file(logins[source]) for source in logins}
    for index, role in enumerate(spec.task_roles):
        files |= _render_command_files(role, index)
        values = {**(secrets or {}), **static[role.name]}
        files[f"env/{index}.sh"] = render_role_script(
            {name: quote(value) for name, value in values.items() if name not in dirs.variables},
            {name: quote_path(value) for name, value in dirs.variables.items()},
            variables.by_role[role.name],
            labels[role.name],
            peers,
            quote,
        )
    return RenderedJob(batch, task, files)


def filter_image_files(names: Collection[str]) -> frozenset[str]:
    """RenderOptions.image_files from a directory listing."""
    return frozenset(name for name in names if name.endswith((".sif", ".sqsh", ".img")))
