"""Names by which tasks reach each other: the beginnings of host names, and whether a job has SSH between its tasks. Pure."""

from __future__ import annotations

import re
from typing import Literal

from core.messages import Message, msg
from jobs.jobfile import JobSpec
from jobs.jobfile.frameworks import assign_roles
from jobs.script.render_options import Runtime

SshMode = Literal["off", "optional", "required"]

_NOT_IN_HOST_NAME = re.compile(r"[^a-z0-9]+")
_USABLE_IN_HOSTS_FILE = re.compile(r"[A-Za-z0-9._~-]+")
# Strategies whose launcher starts processes in the other tasks with ssh.
_SSH_STRATEGIES = (("horovod", "horovodrun"), ("mpi", "hostfile"))


def list_host_name_prefixes(spec: JobSpec) -> list[tuple[str, ...]]:
    """List the names of each role in host names: task 0 of a role named worker is worker-0.

    A role's own name comes first, as in OpenPAI. Host names consist of letters, digits and hyphens: a role with other
    characters also has a valid form (ps_server: ps-server). Its position gives the last form (task0, as in Octopus),
    which names of other characters than ASCII need. A form that another role has is left out.
    """
    taken = {role.name.lower() for role in spec.task_roles}
    result = []
    for position, role in enumerate(spec.task_roles):
        prefixes = [role.name] if _USABLE_IN_HOSTS_FILE.fullmatch(role.name) else []
        for form in (_NOT_IN_HOST_NAME.sub("-", role.name.lower()).strip("-"), f"task{position}"):
            if form and form not in taken:
                taken.add(form)
                prefixes.append(form)
        result.append(tuple(prefixes))
    return result


def find_ssh_limits(spec: JobSpec, runtime: Runtime) -> list[tuple[str, Message]]:
    """Find what SSH between tasks needs on clusters with this container runtime: (path in the job file, message)."""
    if not spec.job_ssh:
        return []
    if runtime == "pyxis":
        message = msg(
            "submission.jobssh-pyxis",
            "on this cluster (Pyxis), the SSH server runs in the containers: the images need sshd.",
        )
    elif runtime == "none":
        message = msg(
            "submission.jobssh-no-containers",
            "this cluster runs jobs without containers: only ssh knows the names of the tasks.",
        )
    else:
        return []
    return [("jobssh", message)]


def decide_ssh_mode(spec: JobSpec) -> SshMode:
    """Decide whether the tasks can reach each other with ssh.

    "optional": the job's launcher uses ssh if its tasks are on several nodes. The job runs without it, too.
    """
    if spec.job_ssh:
        return "required"
    assignment = assign_roles(spec)
    if assignment is None or spec.task_count == 1:
        return "off"
    strategy = assignment.strategy
    return "optional" if (strategy.framework, strategy.name) in _SSH_STRATEGIES else "off"
