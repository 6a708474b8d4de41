"""Every path of one attempt of a job on the cluster. Pure: joins paths, accesses no files."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass

# Of an attempt's directory: data of its roles, which may hold the values of secrets.
ROLE_DATA_FILE = "roles.sh"


@dataclass(frozen=True, slots=True)
class AttemptPaths:
    """`<work root>/jobs/<job uuid>/<attempt>/` and its contents."""

    work_root: str
    job_uuid: str
    attempt: int

    def __post_init__(self) -> None:
        if not self.work_root.startswith("/"):
            raise ValueError(f"work root must be an absolute path: {self.work_root!r}")
        if not all(c.isalnum() or c in "-_" for c in self.job_uuid) or not self.job_uuid:
            raise ValueError(f"not the uuid of a job: {self.job_uuid!r}")

    @classmethod
    def from_dir(cls, directory: str) -> AttemptPaths:
        """From the attempt's directory, as stored with the attempt."""
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
        """The work directory: the submission token in squeue and sacct, and the job's --chdir."""
        return posixpath.join(self.job_dir, str(self.attempt))

    def path_to(self, *names: str) -> str:
        return posixpath.join(self.dir, *names)

    @property
    def job_json(self) -> str:
        return self.path_to("job.json")

    @property
    def batch_script(self) -> str:
        return self.path_to("batch.sh")

    @property
    def code_dir(self) -> str:
        """Uploaded code is unpacked here."""
        return self.path_to("code")

    @property
    def logs_dir(self) -> str:
        return self.path_to("logs")

    @property
    def batch_log(self) -> str:
        return self.path_to("logs", "batch.log")

    @property
    def tasks_dir(self) -> str:
        return self.path_to("tasks")

    @property
    def verdict(self) -> str:
        return self.path_to("verdict")

    @property
    def release(self) -> str:
        """If this file exists, failed tasks that isDebug keeps running end."""
        return self.path_to("release")

    def task_log(self, role: str, index: int) -> str:
        return self.path_to("logs", f"{role}-{index}.log")

    def task_state(self, role: str, index: int) -> str:
        return self.path_to("tasks", f"{role}-{index}.state")
