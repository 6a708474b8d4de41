"""The list of the engine's passes over jobs, which `jobs.apps` registers."""

from __future__ import annotations

from collections.abc import Sequence

from clusters.passes import Pass, PassContext
from jobs.sync.cleanup import DeletedJobsPass, UploadsPass
from jobs.sync.control import ControlPass
from jobs.sync.image_list import ImageListPass
from jobs.sync.poller import Poller
from jobs.sync.secret_files import SecretFilesPass
from jobs.sync.submitter import Submitter
from jobs.sync.task_reader import TaskReader


def build_job_passes(context: PassContext) -> Sequence[Pass]:
    """Build the passes for one cluster, in the order in which the engine runs them."""
    task_reader = TaskReader(context)
    return [
        Submitter(context),
        ControlPass(context),
        Poller(context, task_reader),
        task_reader,
        SecretFilesPass(context),
        DeletedJobsPass(context),
        UploadsPass(context),
        ImageListPass(context),
    ]
