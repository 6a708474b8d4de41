"""Paths of the files of one attempt of a job on the cluster. Pure: joins paths, accesses no files."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass

# File in the attempt's directory with the data of its roles (`role_data`).
ROLE_DATA_FILE = "roles.sh"
# File in the attempt's directory with the values of secrets (`role_data`). It exists only while the attempt may run.
SECRETS_FILE = "secrets.sh"
# Directory in the attempt's directory with the keys of SSH between tasks: whoever has them can log in as the owner.
SSH_KEYS_DIR = "ssh"
# Files that are removed when the attempt has ended. roles.sh had the values of secrets before there was secrets.sh.
SECRET_NAMES = (SECRETS_FILE, SSH_KEYS_DIR, ROLE_DATA_FILE)

_SECRET_PATH = re.compile(
    rf"/[0-9a-f]{{8}}(-[0-9a-f]{{4}}){{3}}-[0-9a-f]{{12}}/\d+/({'|'.join(map(re.escape, SECRET_NAMES))})(/|\Z)"
)

# Directories in the job's directory for results and models, if the job file names none. Everyone who may see the job may
# read them.
_OUTPUT, _MODEL = JOB_DIRECTORIES = ("output", "model")


@dataclass(frozen=True, slots=True)
class AttemptPaths:
    """The attempt's directory `<work root>/jobs/<job uuid>/<attempt>/` and the files in it."""

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
        """Build the paths from the attempt's directory, which is stored in the attempt's row. Raises ValueError."""
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
    def checkpoint_dir(self) -> str:
        """CHECKPOINT_DIR of the tasks. All attempts of the job share it, so that a retry can resume."""
        return posixpath.join(self.job_dir, "checkpoint")

    @property
    def output_dir(self) -> str:
        """Directory for the results of a job without outputDir. All attempts of the job share it."""
        return posixpath.join(self.job_dir, _OUTPUT)

    @property
    def model_dir(self) -> str:
        """Directory for the models of a job without modelDir. All attempts of the job share it."""
        return posixpath.join(self.job_dir, _MODEL)

    @property
    def dir(self) -> str:
        """The work directory: sbatch gets it as --chdir; squeue and sacct show it, so it is the submission token."""
        return posixpath.join(self.job_dir, str(self.attempt))

    def path_to(self, *names: str) -> str:
        return posixpath.join(self.dir, *names)

    @property
    def batch_script(self) -> str:
        return self.path_to("batch.sh")

    @property
    def code_dir(self) -> str:
        """The job's code: unpacked from an upload by the engine, or copied from codeDir by the batch script."""
        return self.path_to("code")

    @property
    def release_marker(self) -> str:
        """If this file exists, failed tasks are no longer kept (isDebug); task.sh waits for it."""
        return self.path_to("release")

    @property
    def logs_dir(self) -> str:
        return self.path_to("logs")

    @property
    def batch_log(self) -> str:
        return self.path_to("logs", "batch.log")

    def task_log(self, role: str, index: int) -> str:
        return self.path_to("logs", f"{role}-{index}.log")


def is_secret_path(real_path: str) -> bool:
    """Whether this is a file with secrets of any job's attempt, or in such a directory. All symbolic links are resolved.

    Any job's, because a job may read the directory of another one of the same person as its output.
    """
    return _SECRET_PATH.search(real_path) is not None
