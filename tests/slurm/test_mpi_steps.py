"""Steps that run several roles of one MPI program, and Slurm's variables in tasks, on the embedded cluster."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.script.task_state import STOP_SIGNAL
from tests.slurm.batch_harness import BatchHarness, SubmittedAttempt
from tests.slurm.batch_harness import batch_harness as batch_harness

pytestmark = pytest.mark.cluster

SHOW = (
    'echo "up $PAI_CURRENT_TASK_ROLE_NAME $PAI_TASK_INDEX $MPI_RANK $SLURM_PROCID $SLURM_STEP_ID"'
)
UNEQUAL = {"cpuNumber": 2}


def submit_world(
    harness: BatchHarness,
    *,
    chief: str,
    worker: str,
    worker_fields: dict[str, Any] | None = None,
    **fields: Any,
) -> SubmittedAttempt:
    """Submit a chief and two workers that srun starts as one MPI program, with Slurm's default MPI plugin."""
    roles = [
        {"name": "worker", "command": worker, "taskNumber": 2, **(worker_fields or {})},
        {"name": "chief", "command": chief},
    ]
    return harness.submit({"framework": "mpi", "taskRoles": roles, **fields})


@pytest.mark.proves("framework", "framework.name")
@pytest.mark.parametrize("worker_fields", [{}, UNEQUAL], ids=["equal", "unequal"])
def test_one_step_runs_all_roles_of_the_program(
    batch_harness: BatchHarness, worker_fields: dict[str, Any]
) -> None:
    job = submit_world(batch_harness, chief=SHOW, worker=SHOW, worker_fields=worker_fields)
    assert job.wait_for_end() == ("COMPLETED", "0:0")
    assert job.log_text("chief", 0) == "up chief 0 0 0 0\n"
    assert job.log_text("worker", 0) == "up worker 0 1 1 0\n"
    assert job.log_text("worker", 1) == "up worker 1 2 2 0\n"
    states = [job.state("chief", 0), job.state("worker", 0), job.state("worker", 1)]
    assert [state and (state.state, state.exit_code) for state in states] == [("ended", 0)] * 3
    assert job.script_result().rule == "all_ended"


@pytest.mark.parametrize("worker_fields", [{}, UNEQUAL], ids=["equal", "unequal"])
def test_failed_task_ends_the_whole_program(
    batch_harness: BatchHarness, worker_fields: dict[str, Any]
) -> None:
    worker = 'echo up; [ "$PAI_TASK_INDEX" = 0 ] && sleep 600; sleep 1; exit 7'
    job = submit_world(
        batch_harness, chief="echo up; sleep 600", worker=worker, worker_fields=worker_fields
    )
    assert job.wait_for_end() == ("FAILED", "7:0")
    result = job.script_result()
    assert (result.rule, result.role, result.index) == ("min_failed", "worker", 1)
    states = [job.state("chief", 0), job.state("worker", 0), job.state("worker", 1)]
    assert [state and state.exit_code for state in states] == [143, 143, 7]


@pytest.mark.parametrize("worker_fields", [{}, UNEQUAL], ids=["equal", "unequal"])
def test_stop_reaches_every_task_of_the_program_once(
    batch_harness: BatchHarness, worker_fields: dict[str, Any]
) -> None:
    command = "trap 'echo SIGTERM; exit 0' TERM; echo up; while :; do sleep 0.1; done"
    job = submit_world(batch_harness, chief=command, worker=command, worker_fields=worker_fields)
    tasks = (("chief", 0), ("worker", 0), ("worker", 1))
    for name, index in tasks:
        job.wait_for_output(name, index)
    job.command("scancel", "--batch", f"--signal={STOP_SIGNAL}", job.slurm_job_id)
    assert job.wait_for_end()[0] == "CANCELLED"
    assert [job.log_text(*task).count("SIGTERM") for task in tasks] == [1, 1, 1]


@pytest.mark.proves("slurmVariables")
def test_tasks_get_slurm_variables_under_other_names(batch_harness: BatchHarness) -> None:
    command = 'echo "${SLURM_JOB_ID-none} $SLUICE_SLURM_JOB_ID"; env | grep -c "^SLURM_[^C]"'
    roles = [{"name": "w", "command": command}]
    hidden = batch_harness.submit({"taskRoles": roles})
    shown = batch_harness.submit({"taskRoles": roles, "slurmVariables": True})
    # grep finds nothing and exits with 1.
    assert hidden.wait_for_end() == ("FAILED", "1:0")
    assert hidden.log_text("w") == f"none {hidden.slurm_job_id}\n0\n"
    assert shown.wait_for_end() == ("COMPLETED", "0:0")
    assert shown.log_text("w").startswith(f"{shown.slurm_job_id} {shown.slurm_job_id}\n")


def test_without_container_tasks_do_not_inherit_slurm_variables(
    batch_harness: BatchHarness,
) -> None:
    roles = [{"name": "w", "command": 'echo "${SLURM_JOB_ID-none} ${SLUICE_SLURM_JOB_ID-none}"'}]
    job = batch_harness.submit({"taskRoles": roles}, runtime="none")
    assert job.wait_for_end() == ("COMPLETED", "0:0")
    assert job.log_text("w") == f"none {job.slurm_job_id}\n"
