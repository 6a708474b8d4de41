"""Slurm's dialect: build the command, read the answer.

The rest of Sluice imports from here. Pure: argv lists out, values in; `clusters.slurm_client` runs them.
Subjects: states and reasons (words), fields (how values are written), failures (saying no), jobs (squeue,
sacct, steps), submit (sbatch), control (scancel, scontrol), nodes (capacity), accounting (sacctmgr).
"""

from __future__ import annotations

from clusters.slurm.accounting import Association, Qos, SlurmUser
from clusters.slurm.control import Controller, ControlResult, SlurmConfig
from clusters.slurm.fields import SlurmCommands, Tres, expand_nodes, fold_nodes
from clusters.slurm.jobs import (
    JobRecord,
    StepRecord,
    StepUsage,
    merge_records,
    newest_runs,
    ran_out_of_memory,
)
from clusters.slurm.reasons import ExitStatus, Explanation, explain_end, explain_reason
from clusters.slurm.sbatch import ExpectedStart, SubmitOutcome, SubmitRequest
from clusters.slurm.states import (
    JOB_STATES,
    ReportedState,
    SlurmJobState,
    SlurmPhase,
    parse_job_state,
)

__all__ = [
    "JOB_STATES",
    "Association",
    "ControlResult",
    "Controller",
    "ExitStatus",
    "ExpectedStart",
    "Explanation",
    "JobRecord",
    "Qos",
    "ReportedState",
    "SlurmCommands",
    "SlurmConfig",
    "SlurmJobState",
    "SlurmPhase",
    "SlurmUser",
    "StepRecord",
    "StepUsage",
    "SubmitOutcome",
    "SubmitRequest",
    "Tres",
    "expand_nodes",
    "explain_end",
    "explain_reason",
    "fold_nodes",
    "merge_records",
    "newest_runs",
    "parse_job_state",
    "ran_out_of_memory",
]
