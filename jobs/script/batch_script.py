"""Renders the beginning of batch.sh: the sbatch options (#SBATCH lines) and the job's data.

The text of shell/batch.sh, which is the same for all jobs, follows it. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby

from core.messages import join_with_and, msg
from jobs.jobfile import TaskRole
from jobs.jobfile.fields import format_duration
from jobs.plan import Group, Plan, RolePlan, describe_plan
from jobs.script.context import RenderContext
from jobs.script.directories import MAX_CODE_MIB, Bind
from jobs.script.host_names import decide_ssh_mode, list_host_name_prefixes
from jobs.script.quoting import quote, quote_path, render_array, render_case_function
from jobs.script.render_options import RenderError
from jobs.script.task_state import ScriptExit, render_exit_codes

# Slurm sends the signal of `sbatch --signal` up to a minute earlier than requested. A job with a time limit below
# this value does not request the signal, because it could get it at its start, before the script handles it; the
# script measures the time instead.
_MIN_TIME_LIMIT_FOR_SIGNAL_S = 300
# Variables with directories of a task, in the order in which the batch log shows them.
_LOGGED_VARIABLES = (
    "DATA_DIR",
    "RESULT_DIR",
    "MODEL_DIR",
    "CODE_DIR",
    "PAI_CODE_DIR",
    "CHECKPOINT_DIR",
)
_UNQUOTED_OPTION_VALUE = re.compile(r"[\w./:=,+@~&|*!()\[\]-]+")


def _render_sbatch_line(option: str, value: object) -> str:
    """Render one #SBATCH line. Raises RenderError.

    sbatch splits the line into words like a shell, but expands no variables.
    """
    text = str(value)
    if any(ord(c) < 32 for c in text):
        raise RenderError(
            msg(
                "script.cannot-hold-control-characters",
                "--%(option)s must not contain control characters.",
                option=option,
            )
        )
    if not _UNQUOTED_OPTION_VALUE.fullmatch(text):
        text = '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return f"#SBATCH --{option}={text}"


def _build_group_options(group: Group, roles: Sequence[RolePlan]) -> list[tuple[str, object]]:
    """Build the sbatch options of one allocation: per task if it has one role, per node if roles share it."""
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
    role = roles[0]  # all tasks of the group are equal
    if group.fixed_nodes:
        options.append(("nodes", group.nodes))
    options.append(("ntasks", sum(role.tasks for role in roles)))
    if role.per_node is not None:
        options.append(("ntasks-per-node", role.per_node))
    options += [("cpus-per-task", role.cpus), ("mem-per-cpu", f"{role.mem_mib // role.cpus}M")]
    return [*options, ("gpus-per-task", gpu)] if role.gpus else options


def _limit_is_announced(plan: Plan) -> bool:
    """Whether Slurm announces the time limit to the batch script."""
    return plan.time_limit_s is None or plan.time_limit_s >= _MIN_TIME_LIMIT_FOR_SIGNAL_S


def _render_header(context: RenderContext) -> list[str]:
    spec, plan, paths, options = context.spec, context.plan, context.paths, context.options
    time_limit = "" if plan.time_limit_s is None else format_duration(plan.time_limit_s)
    common_options = {
        "account": plan.account,
        "qos": plan.qos,
        "constraint": plan.constraint,
        "time": time_limit,
        "chdir": paths.dir,
    }
    lines = [
        "#!/bin/bash",
        f"# Job {spec.job_name}, attempt {paths.attempt}: {plan.layout}.",
        *(f"# {line}" for line in describe_plan(plan)),
        _render_sbatch_line("job-name", spec.job_name),
        _render_sbatch_line("output", "logs/batch.log"),
        _render_sbatch_line("open-mode", "append"),
        _render_sbatch_line("export", "NONE"),
        "#SBATCH --requeue" if options.requeue else "#SBATCH --no-requeue",
    ]
    if _limit_is_announced(plan):
        lines.append(_render_sbatch_line("signal", f"B:USR1@{context.grace_s}"))
    for group, roles in plan.list_groups():
        if group.index:
            lines.append("#SBATCH hetjob")
        lines += [
            _render_sbatch_line(name, value) for name, value in common_options.items() if value
        ]
        lines += [
            _render_sbatch_line(name, value) for name, value in _build_group_options(group, roles)
        ]
    return lines


def _build_component_options(plan: Plan, roles: Sequence[RolePlan]) -> list[str]:
    """Build the options of srun for roles with equal tasks in one group."""
    role, tasks = roles[0], sum(role.tasks for role in roles)
    group = plan.groups[role.group]
    options = [f"--het-group={group.index}"] if plan.layout == "het" else []
    options += ["--exact", f"--ntasks={tasks}", f"--cpus-per-task={role.cpus}"]
    if role.per_node is not None:
        nodes = -(-tasks // role.per_node)
        is_even = nodes * role.per_node == tasks
        # srun accepts --ntasks-per-node only if every node gets the same number of tasks. Otherwise
        # --distribution=cyclic spreads the tasks as evenly as possible.
        spread = f"--ntasks-per-node={role.per_node}" if is_even else "--distribution=cyclic"
        options += [f"--nodes={nodes}", spread]
    if group.shared:
        options.append(f"--mem={(role.per_node or 1) * role.mem_mib}M")
    else:
        options.append(f"--mem-per-cpu={role.mem_mib // role.cpus}M")
    # Slurm 22.05: if the options of a step name a GPU type, its tasks see no GPU. Without --gpu-bind, each task sees
    # all GPUs of the step.
    options += (
        [f"--gpus-per-task={role.gpus}", f"--gpu-bind=per_task:{role.gpus}"]
        if role.gpus
        else ["--gres=none"]
    )
    return options


def _decide_completion_rules(role: TaskRole) -> tuple[int, int, int]:
    """Decide a role's values of the arrays min_failed, min_succeeded and main_role in batch.sh.

    0 disables a rule. The end of a main role ends the job.
    """
    failed = role.min_failed_task_count or 0
    succeeded = role.min_succeeded_task_count or 0
    if role.is_main:
        return failed or 1, succeeded or role.task_number, 1
    return failed, succeeded, 0


_BATCH_EXIT_CODES = (
    ScriptExit.START_FAILED,
    ScriptExit.IMAGE_MISSING,
    ScriptExit.IMAGE_FAILED,
    ScriptExit.MOUNT_MISSING,
    ScriptExit.CODE_TOO_LARGE,
    ScriptExit.CODE_FAILED,
    ScriptExit.TASK_LOST,
    ScriptExit.LAUNCH_FAILED,
    ScriptExit.SSH_FAILED,
    ScriptExit.STOPPED,
)


def render_batch_data(context: RenderContext, *, has_secrets: bool) -> str:
    """Render the part of batch.sh that differs between jobs; shell/batch.sh follows it."""
    plan = context.plan
    rules = [_decide_completion_rules(role) for role in context.spec.task_roles]
    lines = [
        *_render_header(context),
        "# shellcheck disable=SC2016  # text in single quotes is data",
        "",
        "# ---- Data of the job: arrays by role, in the order of the job file " + "-" * 26,
        f"attempt_dir={quote(context.paths.dir)}",
        f"grace_s={context.grace_s} # between SIGTERM and SIGKILL",
        f"runtime={context.options.runtime} ssh_mode={decide_ssh_mode(context.spec)} # SSH between tasks",
        f"has_secrets={int(has_secrets)} # 1: secrets.sh has their values",
        f"time_limit_s={context.slurm_time_limit_s or 0} limit_signal={int(_limit_is_announced(plan))} # 1: Slurm announces the limit",
        render_array("role_names", (quote(role.name) for role in plan.roles)),
        render_array(
            "role_hosts",
            (quote(" ".join(names)) for names in list_host_name_prefixes(context.spec)),
            "host names of tasks, without the index",
        ),
        render_array("role_tasks", (str(role.tasks) for role in plan.roles)),
        render_array("role_groups", (str(role.group) for role in plan.roles), "het job component"),
        render_array(
            "step_roles",
            (",".join(str(role.index) for role in roles) for roles in plan.list_steps()),
            "numbers of the roles of each step, in the order of their ranks",
        ),
        render_array(
            "min_failed", (str(r[0]) for r in rules), "failed tasks that fail the job; 0: no limit"
        ),
        render_array(
            "min_succeeded",
            (str(r[1]) for r in rules),
            "succeeded tasks that complete the job; 0: all tasks must end",
        ),
        render_array(
            "main_role", (str(r[2]) for r in rules), "1: the end of this role ends the job"
        ),
        *_render_image_data(context),
        *_render_pyxis_mounts(context),
        render_array("created_dirs", (quote_path(d) for d in context.dirs.created)),
        render_array("required_dirs", (quote_path(d) for d in context.dirs.required)),
        f"code_source={quote_path(context.dirs.code_source)} code_limit_mib={MAX_CODE_MIB} # copied to code/",
        render_array("log_dirs", _list_log_directories(context), "variable and directory, each"),
        render_exit_codes(*_BATCH_EXIT_CODES),
        "",
        "# step_options STEP: sets options, the arguments of the step's srun, with a colon between het job components.",
        *render_case_function(
            "step_options",
            (
                (index, _render_step(context, roles))
                for index, roles in enumerate(plan.list_steps())
            ),
        ),
        "",
        "",
    ]
    return "\n".join(lines)


def _list_log_directories(context: RenderContext) -> Iterator[str]:
    """List the directories that the head of the batch log shows, each after the variable that names it in the tasks."""
    variables = context.dirs.variables
    for name in _LOGGED_VARIABLES:
        if path := variables.get(name, ""):
            yield name
            yield quote_path(path)


def _render_image_data(context: RenderContext) -> list[str]:
    images, program = context.images, context.runtime_program
    lines = [
        render_array("image_files", (quote_path(i.path) if i.path else "''" for i in images)),
        render_array("image_sources", (quote(i.source) for i in images)),
        render_array("image_names", (quote(i.name) for i in images), "for messages"),
    ]
    if not any(image.source for image in images):
        return [*lines, "fetch_command=() auth_file='' has_image_logins=0 # all images are files"]
    runtime = context.options.runtime
    if runtime in ("enroot", "pyxis"):
        program = "enroot" if runtime == "pyxis" else program
        lines.append(f"fetch_command=({quote_path(program)} import --output)")
    else:
        lines.append(f"fetch_command=({quote_path(program)} pull)")
    auth_file = quote_path(context.spec.auth_file)
    return [*lines, f"auth_file={auth_file} has_image_logins={int(bool(context.logins))}"]


def _render_pyxis_gpus(context: RenderContext, role: RolePlan) -> str:
    """Render the variables by which enroot's NVIDIA hook decides which devices and libraries it mounts.

    Pyxis starts the container before Slurm gives the GPUs to the tasks. "all" are those of the job if Slurm limits the
    devices (ConstrainDevices); CUDA_VISIBLE_DEVICES selects those of each task.
    """
    if role.gpus and context.options.gpu_option == "--nv":
        return "export NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility,video"
    return "export NVIDIA_VISIBLE_DEVICES=void"


def _render_step(context: RenderContext, roles: Sequence[RolePlan]) -> list[str]:
    is_mpi = roles[0].index in context.plan.mpi_roles
    mpi = context.options.mpi if is_mpi else "none"
    components = []
    for _, members in groupby(roles, key=lambda role: role.group):
        component = list(members)
        options = _build_component_options(context.plan, component)
        options += [f"--mpi={mpi}"] if mpi else []  # none: Slurm's default
        # The tasks read "go" from this pipe. Two components that read the same standard input would share its bytes.
        options.append(f'--input="/dev/fd/${{go_pipe[{component[0].index}]}}"')
        components.append(" ".join(options))
    lines = [f"options=({' : '.join(components)})"]
    if context.options.runtime != "pyxis":
        return lines
    role = roles[0]  # several roles are one MPI program, which has no /dev/shm of its own
    # One container per node: the tasks of the role on a node share its /dev/shm and devices.
    shm_mib = context.shm_mib_of(role) * (role.per_node or role.tasks)
    if shm_mib:
        lines.append(f"use_pyxis_shm {role.index} {shm_mib}")
    lines.append(_render_pyxis_gpus(context, role))
    # Pyxis applies the container options of one component to all.
    return [
        *lines,
        f"options+=(--container-image={quote_path(_find_step_image(context, roles))})",
        'options+=(--container-mounts="$container_mounts")',
        f"options+=(--container-workdir={quote(context.paths.dir)} --container-mount-home --container-writable)",
    ]


def _find_step_image(context: RenderContext, roles: Sequence[RolePlan]) -> str:
    """Find the image file of all roles of a step. Raises RenderError if they differ."""
    files = {context.images[role.index].path for role in roles}
    if len(files) > 1:
        raise RenderError(
            msg(
                "script.mpi-roles-need-one-image",
                "Roles %(roles)s form one MPI program, and this cluster's container runtime (Pyxis) starts one image per program. Give these roles the same image.",
                roles=join_with_and([role.name for role in roles]),
            )
        )
    return files.pop()


def _render_pyxis_mounts(context: RenderContext) -> list[str]:
    """Render the mounts of all containers that srun starts."""
    if context.options.runtime != "pyxis":
        return []
    mounts = (
        f"{quote_path(b.source)}:{quote_path(b.target)}{':ro' if b.read_only else ''}"
        for b in _list_pyxis_binds(context)
    )
    return [f"container_mounts={','.join(mounts)}"]


def _list_pyxis_binds(context: RenderContext) -> tuple[Bind, ...]:
    """List the mounts of a container that srun starts: before the addresses of the tasks are known.

    batch.sh adds them to the file that is mounted as /etc/hosts.
    """
    binds = context.dirs.binds
    if any(bind.target == "/etc/hosts" for bind in binds):
        return binds
    return (*binds, Bind(context.paths.path_to("hosts"), "/etc/hosts", read_only=True))
