"""Slurm commands: builds their argv and parses their output. Other packages import the types that they need from here.

One module per command: squeue, sacct, sbatch, sacctmgr, scontrol (read-only commands), nodes (scontrol show node
and partition), control (scancel, and the scontrol command that changes a job). Shared: records (a job as reported),
states, time_limits (the longest limit that Slurm allows a job), reasons (why a job waits or ended), fields (value formats), errors (failed commands). Everything here is pure;
`client` runs the commands through a Transport.
"""

from __future__ import annotations

from clusters.slurm.fields import SlurmCommands, Tres, expand_nodes
from clusters.slurm.records import JobRecord, newest_runs
from clusters.slurm.sacctmgr import Association, Qos, SlurmUser
from clusters.slurm.sbatch import SubmitOutcome, SubmitRequest
from clusters.slurm.states import SlurmPhase, parse_job_state

__all__ = [
    "Association",
    "JobRecord",
    "Qos",
    "SlurmCommands",
    "SlurmPhase",
    "SlurmUser",
    "SubmitOutcome",
    "SubmitRequest",
    "Tres",
    "expand_nodes",
    "newest_runs",
    "parse_job_state",
]
