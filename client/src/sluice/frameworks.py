"""Distributed training jobs: one class per framework, with the same parameters.

    job = TensorFlowJob("mnist", strategy="ps", workers=2, ps=1, image="tensorflow", command="python train.py")
    job.submit(); job.wait(); print(job.logs().read().decode())

The table of the roles of each strategy is a copy of the server's; a test compares both.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, ClassVar

from sluice.client import Client, Code, default_log_role
from sluice.display import badge, job_html, table
from sluice.errors import Invalid
from sluice.logs import LogStream
from sluice.messages import t
from sluice.values import Job, Plan, Task

# (framework, strategy) → (required roles, optional roles), both in the order of the job file. The first strategy of
# a framework is its default.
STRATEGY_ROLES: Mapping[tuple[str, str], tuple[tuple[str, ...], tuple[str, ...]]] = {
    ("tensorflow", "ps"): (("ps", "worker"), ("chief", "evaluator")),
    ("tensorflow", "multiworker"): (("worker",), ("chief", "evaluator")),
    ("pytorch", "ddp"): (("worker",), ("chief",)),
    ("pytorch", "torchrun"): (("worker",), ("chief",)),
    ("horovod", "ring"): (("worker",), ("chief",)),
    ("horovod", "horovodrun"): (("worker",), ("chief",)),
    ("mxnet", "ps"): (("scheduler", "ps", "worker"), ()),
    ("xgboost", "rabit"): (("worker",), ("scheduler", "ps")),
    ("paddle", "collective"): (("worker",), ()),
    ("mindspore", "collective"): (("worker",), ("scheduler",)),
    ("mpi", "srun"): (("worker",), ("chief",)),
    ("mpi", "hostfile"): (("worker",), ("chief",)),
}
# Alias → strategy.
_STRATEGY_ALIASES: Mapping[str, str] = {
    "parameterserver": "ps",
    "psworker": "ps",
    "multiworkermirrored": "multiworker",
    "mirrored": "multiworker",
    "allreduce": "multiworker",
    "masterworker": "ddp",
    "ringallreduce": "ring",
    "dmlc": "ps",
}
_MEMORY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?\s*", re.IGNORECASE)
_MIB_PER_UNIT = {"": 1.0, "k": 1 / 1024, "m": 1.0, "g": 1024.0, "t": 1024.0 * 1024}
# The tasks of these roles do not end by themselves and use no GPU.
_SERVER_ROLES = ("ps", "scheduler")


def memory_mib(value: int | str) -> int:
    """Parse an amount such as "4GB", "512 MiB" or 4096. A number without unit is in MiB."""
    match = _MEMORY.fullmatch(str(value))
    if match is None or isinstance(value, bool):
        raise Invalid(
            t("{value} is not an amount of memory; write it as 4GB or 512MB.", value=repr(value)),
            code="memory",
        )
    return max(1, round(float(match[1]) * _MIB_PER_UNIT[match[2].lower()]))


class FrameworkJob:
    """Base class of the job classes. Each subclass is for the jobs of one framework."""

    framework: ClassVar[str] = ""

    def __init__(
        self,
        name: str,
        *,
        command: str | Sequence[str],
        image: str = "",
        version: str = "",
        strategy: str = "",
        workers: int = 1,
        ps: int = 0,
        chief: bool = False,
        evaluator: bool = False,
        scheduler: bool | None = None,
        cpus: int = 1,
        memory: int | str = "1GB",
        shm: int | str | None = None,
        gpus: int = 0,
        gpu_type: str = "",
        params: Mapping[str, Any] | None = None,
        env: Mapping[str, str | int | float | bool] | None = None,
        code: Code | None = None,
        code_dir: str = "",
        data: str = "",
        output: str = "",
        namespace: str = "",
        time_limit: str | int | None = None,
        estimated_duration: str | int | None = None,
        retries: int = 0,
        ssh: bool = False,
        description: str = "",
        labels: Mapping[str, str] | None = None,
        slurm_variables: bool = False,
        roles: Mapping[str, Mapping[str, Any]] | None = None,
        client: Client | None = None,
    ) -> None:
        """Describe a job.

        `version` selects the cluster's image of this version of the framework, in place of `image`;
        `Client.frameworks()` lists the versions. `cpus`, `memory` and `gpus` apply to each task. `roles` overrides fields of single roles, by their names in the
        job file: roles={"ps": {"cpuNumber": 4, "memoryMB": 8192}}. `params` are appended to the command as --key=value.
        `ssh` lets tasks reach each other with ssh by their names, such as worker-0.
        `code` is a local directory or archive that is uploaded; `code_dir`, `data` and `output` are directories on the
        cluster. `slurm_variables` gives tasks Slurm's own variables, such as SLURM_JOB_ID.
        """
        self.name = name
        self.strategy = self._resolve_strategy(strategy)
        self.code = code
        self._client = client
        self._job: Job | None = None
        required, _optional = STRATEGY_ROLES[self.framework, self.strategy]
        counts = {
            "worker": workers,
            "ps": ps,
            "chief": int(chief),
            "evaluator": int(evaluator),
            "scheduler": int("scheduler" in required if scheduler is None else scheduler),
        }
        task: dict[str, Any] = {
            "cpuNumber": cpus,
            "memoryMB": memory_mib(memory),
            "gpuNumber": gpus,
            "command": command if isinstance(command, str) else shlex.join(command),
        }
        if shm is not None:
            task["shmMB"] = memory_mib(shm)
        if params:
            task["parameters"] = [{"key": k, "value": v} for k, v in params.items()]
        fields = {
            "jobName": name,
            "namespace": namespace,
            "description": description,
            "codeDir": code_dir,
            "dataDir": data,
            "outputDir": output,
            "gpuType": gpu_type,
            "retryCount": retries,
            "timeLimit": time_limit,
            "estimatedDuration": estimated_duration,
            "jobssh": ssh,
            "jobEnvs": dict(env or {}),
            "labels": dict(labels or {}),
            "slurmVariables": slurm_variables,
        }
        self._spec: dict[str, Any] = {
            key: value for key, value in fields.items() if value not in ("", None, {}, 0)
        }
        # "" selects the default image of the namespace.
        self._spec["image"] = image
        self._spec["framework"] = {"name": self.framework, "strategy": self.strategy}
        if version:
            self._spec["framework"]["version"] = version
        self._spec["taskRoles"] = self._build_roles(counts, task, roles or {})

    @classmethod
    def strategies(cls) -> tuple[str, ...]:
        return tuple(
            strategy for framework, strategy in STRATEGY_ROLES if framework == cls.framework
        )

    def _resolve_strategy(self, given: str) -> str:
        strategies = self.strategies()
        name = re.sub(r"[^a-z0-9]", "", given.lower())
        name = _STRATEGY_ALIASES.get(name, name) if name not in strategies else name
        if not name:
            return strategies[0]
        if name not in strategies:
            raise Invalid(
                t(
                    "{framework} has no strategy {given}; it has {known}.",
                    framework=self.framework,
                    given=repr(given),
                    known=", ".join(strategies),
                ),
                code="strategy",
            )
        return name

    def _build_roles(
        self,
        counts: Mapping[str, int],
        task: Mapping[str, Any],
        overrides: Mapping[str, Mapping[str, Any]],
    ) -> list[dict[str, Any]]:
        required, optional = STRATEGY_ROLES[self.framework, self.strategy]
        role_names = (*required, *optional)
        for role, count in counts.items():
            if count < 0 or (count and role not in role_names) or (not count and role in required):
                raise Invalid(
                    t(
                        "{framework} with strategy {strategy} has the roles {known}, and needs at "
                        "least one {required}; {role} was {count}.",
                        framework=self.framework,
                        strategy=self.strategy,
                        known=", ".join(role_names),
                        required=", ".join(required),
                        role=role,
                        count=count,
                    ),
                    code="roles",
                )
        for role in overrides:
            if not counts.get(role):
                raise Invalid(
                    t("roles contains {role}, but this job has no such role.", role=repr(role)),
                    code="roles",
                )
        main_role = "chief" if counts["chief"] else "worker"
        rows = []
        for role in role_names:
            if not counts[role]:
                continue
            row = {"name": role, "taskNumber": counts[role], **task}
            if role in _SERVER_ROLES:
                row["gpuNumber"] = 0
            elif role == main_role and "ps" in required:
                # The parameter servers do not end by themselves, so the job ends when all tasks of this role succeeded.
                row["minSucceededTaskCount"] = counts[role]
            rows.append({**row, **overrides.get(role, {})})
        return rows

    # --- actions -------------------------------------------------------------------

    def spec(self) -> dict[str, Any]:
        """Return the job file."""
        return {**self._spec, "taskRoles": [dict(role) for role in self._spec["taskRoles"]]}

    @property
    def client(self) -> Client:
        if self._client is None:
            self._client = Client()
        return self._client

    def plan(self) -> Plan:
        return self.client.plan(self)

    def submit(self, *, client: Client | None = None) -> Job:
        """Submit the job. After it has ended, another call submits a new job with the same job file."""
        if client is not None:
            self._client = client
        if self._job is not None and not self.client.show(self._job).ended:
            raise Invalid(
                t(
                    "This job is already submitted ({id}). Wait for it or stop it.",
                    id=self._job.id,
                ),
                code="submitted",
            )
        self._job = self.client.submit(self)
        return self._job

    @property
    def job(self) -> Job:
        """The job as last read from the server."""
        if self._job is None:
            raise Invalid(
                t("This job has not been submitted: call submit()."), code="not_submitted"
            )
        return self._job

    @property
    def id(self) -> str:
        return self.job.id

    @property
    def status(self) -> str:
        """Request the current state: QUEUED, PENDING, RUNNING, COMPLETED, FAILED or STOPPED."""
        self._job = self.client.show(self.job)
        return self._job.state

    @property
    def tasks(self) -> Sequence[Task]:
        return self.client.tasks(self.job)

    def wait(self, *, timeout: float | None = None) -> Job:
        self._job = self.client.wait(self.job, timeout=timeout)
        return self._job

    def logs(
        self, role: str = "", index: int = 0, *, follow: bool = False, offset: int = 0
    ) -> LogStream:
        """Return the output of a task: iterate over it for bytes, or use `.text`, `.lines()` or `.read()`."""
        role = role or default_log_role(self._spec)
        return self.client.logs(self.job, role, index, follow=follow, offset=offset)

    def stop(self) -> Job:
        self._job = self.client.stop(self.job)
        return self._job

    def download(self, to: str | os.PathLike[str]) -> Sequence[Path]:
        """Download the results into a local directory."""
        return self.client.download_tree(self.job, to)

    def __repr__(self) -> str:
        submitted = f", {self._job.state} {self._job.id}" if self._job else ""
        return f"{type(self).__name__}({self.name!r}, strategy={self.strategy!r}{submitted})"

    def _repr_html_(self) -> str:
        if self._job is not None:
            return job_html(self._job.raw)
        roles = ", ".join(
            f"{role['taskNumber']} × {role['name']}" for role in self._spec["taskRoles"]
        )
        return table(
            [
                ("job", f"<b>{escape(self.name)}</b>"),
                ("state", badge("not submitted")),
                ("framework", escape(f"{self.framework}, {self.strategy}")),
                ("roles", escape(roles)),
            ]
        )


class TensorFlowJob(FrameworkJob):
    """Strategy "ps" (workers and parameter servers) or "multi-worker" (all-reduce). Tasks get TF_CONFIG."""

    framework = "tensorflow"


class PyTorchJob(FrameworkJob):
    """Strategy "ddp" (tasks get MASTER_ADDR, RANK, WORLD_SIZE, …) or "torchrun"."""

    framework = "pytorch"


class HorovodJob(FrameworkJob):
    """Strategy "ring" (Gloo, whose variables all tasks get) or "horovodrun"."""

    framework = "horovod"


class XGBoostJob(FrameworkJob):
    """Strategy "rabit". Tasks get DMLC_ROLE, DMLC_TRACKER_URI and the like."""

    framework = "xgboost"


class MXNetJob(FrameworkJob):
    """Strategy "ps": a scheduler, parameter servers and workers. Tasks get DMLC_ROLE and the like."""

    framework = "mxnet"


class PaddleJob(FrameworkJob):
    """Strategy "collective". Tasks get PADDLE_TRAINER_ID, PADDLE_TRAINER_ENDPOINTS and the like."""

    framework = "paddle"


class MindSporeJob(FrameworkJob):
    """Strategy "collective". Tasks get MS_ROLE, MS_SCHED_HOST, RANK_ID and the like."""

    framework = "mindspore"


class MPIJob(FrameworkJob):
    """Strategy "srun" (Slurm's own MPI support) or "hostfile" (mpirun in the first task)."""

    framework = "mpi"
