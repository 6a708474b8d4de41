"""Every path of one attempt of a job on the cluster. Pure: joins, never looks."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttemptPaths:
    """`<work root>/jobs/<job uuid>/<attempt>/` and what lies in it."""

    work_root: str
    job_uuid: str
    attempt: int

    def __post_init__(self) -> None:
        if not self.work_root.startswith("/"):
            raise ValueError(f"work root must be an absolute path: {self.work_root!r}")
        if not all(c.isalnum() or c in "-_" for c in self.job_uuid) or not self.job_uuid:
            raise ValueError(f"not the uuid of a job: {self.job_uuid!r}")

    @classmethod
    def of_dir(cls, directory: str) -> AttemptPaths:
        """From the attempt's directory, as it is kept with the attempt."""
        job_dir, attempt = posixpath.split(directory)
        jobs_dir, job_uuid = posixpath.split(job_dir)
        paths = cls(posixpath.dirname(jobs_dir), job_uuid, int(attempt))
        if paths.dir != directory:
            raise ValueError(f"not the directory of an attempt: {directory!r}")
        return paths

    @property
    def job_dir(self) -> str:
        return posixpath.join(self.work_root, "jobs", self.job_uuid)

    @property
    def dir(self) -> str:
        """The attempt's own directory: its token in squeue and sacct, and the job's --chdir."""
        return posixpath.join(self.job_dir, str(self.attempt))

    def inside(self, *names: str) -> str:
        return posixpath.join(self.dir, *names)

    @property
    def job_json(self) -> str:
        return self.inside("job.json")

    @property
    def batch_script(self) -> str:
        return self.inside("batch.sh")

    @property
    def code_dir(self) -> str:
        """Where uploaded code is unpacked."""
        return self.inside("code")

    @property
    def logs_dir(self) -> str:
        return self.inside("logs")

    @property
    def batch_log(self) -> str:
        return self.inside("logs", "batch.log")

    @property
    def tasks_dir(self) -> str:
        return self.inside("tasks")

    @property
    def verdict(self) -> str:
        return self.inside("verdict")

    @property
    def release(self) -> str:
        """Its appearance ends the wait of failed tasks that isDebug keeps."""
        return self.inside("release")

    def task_log(self, role: str, index: int) -> str:
        return self.inside("logs", f"{role}-{index}.log")

    def task_state(self, role: str, index: int) -> str:
        return self.inside("tasks", f"{role}-{index}.state")
