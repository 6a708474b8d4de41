"""Slurm commands: builds their argv and parses their output. Other packages import the record types from here.

One module per command: squeue, sacct, sbatch, sacctmgr, scontrol (read-only commands), nodes (scontrol show node
and partition), control (scancel, and the scontrol command that changes a job). Shared: records (a job
as reported), states, reasons (waiting reasons and exit codes), fields (value formats), errors (failed commands).
Everything here is pure; `client` runs the commands through a Transport.
"""

from __future__ import annotations

from clusters.slurm.control import ControlResult
from clusters.slurm.fields import ExitStatus, SlurmCommands, Tres, expand_nodes
from clusters.slurm.reasons import Explanation, explain_reason
from clusters.slurm.records import JobRecord, newest_runs
from clusters.slurm.sacctmgr import Association, Qos, SlurmUser
from clusters.slurm.sbatch import ExpectedStart, SubmitOutcome, SubmitRequest
from clusters.slurm.scontrol import Controller, SlurmConfig
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
    "SubmitOutcome",
    "SubmitRequest",
    "Tres",
    "expand_nodes",
    "explain_reason",
    "newest_runs",
    "parse_job_state",
]
