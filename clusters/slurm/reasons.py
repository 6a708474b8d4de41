"""Messages for Slurm's reasons: why a job waits or ended, and whether waiting can help.

Covers every name of `enum job_state_reason` up to 26.05. About two hundred of them name a limit and consist of an
owner, a resource and a scope (QOSMaxGRESPerUser); their messages are composed in the same manner. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from core.messages import Message, msg


@dataclass(frozen=True, slots=True)
class Explanation:
    """The message for one of Slurm's reasons."""

    message: Message
    temporary: bool = True  # the job may start by itself; False: a person must change something


def _explanations_by_name(messages: Iterable[Message], temporary: bool) -> dict[str, Explanation]:
    """Slurm's name of the reason → explanation. The name is the last part of the message's code."""
    return {
        message.code.removeprefix("slurm-reason."): Explanation(message, temporary)
        for message in messages
    }


# Slurm's name of a reason → explanation. Slurm has one field for the reason why a job waits and the reason why it
# ended, so both kinds are in this table.
REASONS: dict[str, Explanation] = {
    **_explanations_by_name(
        (
            msg("slurm-reason.None", "Slurm has not considered the job yet."),
            msg("slurm-reason.Priority", "Jobs with a higher priority are ahead in the queue."),
            msg(
                "slurm-reason.Resources",
                "The job is next in the queue and starts when enough nodes are free.",
            ),
            msg("slurm-reason.Dependency", "The job waits for another job that it depends on."),
            msg(
                "slurm-reason.BeginTime",
                "The job waits for its start time. A requeued job waits a short time before it can start.",
            ),
            msg("slurm-reason.Prolog", "The nodes are being prepared for the job."),
            msg(
                "slurm-reason.Cleaning",
                "The job was requeued; its previous run is still being cleaned up.",
            ),
            msg("slurm-reason.Licenses", "The job waits for software licenses."),
            msg("slurm-reason.Reservation", "The job waits for its reservation to begin."),
            msg(
                "slurm-reason.ReqNodeNotAvail",
                "Nodes that the job needs are down, drained or reserved. It starts when they are available again.",
            ),
            msg("slurm-reason.NodeDown", "A node that the job needs is down."),
            msg("slurm-reason.FrontEndDown", "No front-end node is available."),
            msg(
                "slurm-reason.SchedDefer",
                "Slurm defers the scheduling of new jobs; the job starts a little later.",
            ),
            msg(
                "slurm-reason.PartitionDown",
                "The partition is down. The job starts when it is up again.",
            ),
            msg(
                "slurm-reason.PartitionInactive",
                "The partition is inactive. The job starts when it is active again.",
            ),
            msg("slurm-reason.Constraints", "No available node meets the job's constraints."),
            msg(
                "slurm-reason.QOSUsageThreshold",
                "The account has used more than the QOS allows for now.",
            ),
            msg(
                "slurm-reason.AccountingPolicy",
                "The job waits because of a limit of the account or the QOS.",
            ),
            msg(
                "slurm-reason.JobArrayTaskLimit",
                "The job array runs its maximum number of tasks at once.",
            ),
            msg("slurm-reason.BurstBufferResources", "The job waits for burst buffer space."),
            msg(
                "slurm-reason.BurstBufferStageIn",
                "The job's data is being copied to the burst buffer.",
            ),
            msg(
                "slurm-reason.PowerNotAvail",
                "Not enough electrical power is available to start the job.",
            ),
            msg("slurm-reason.PowerReserved", "The electrical power is reserved for other jobs."),
            msg(
                "slurm-reason.MaxPoweredUpNodes",
                "The cluster's limit on powered-up nodes is reached.",
            ),
            msg(
                "slurm-reason.MpiPortsBusy",
                "The network ports that MPI needs are in use on the nodes.",
            ),
            msg(
                "slurm-reason.FedJobLock", "The job waits for the other clusters of the federation."
            ),
            msg("slurm-reason.SystemFailure", "Slurm or one of its nodes failed."),
            msg(
                "slurm-reason.AssociationJobLimit",
                "The account's limit on running jobs is reached.",
            ),
            msg(
                "slurm-reason.AssociationResourceLimit",
                "The account's limit on resources is reached.",
            ),
            msg("slurm-reason.QOSJobLimit", "The QOS's limit on running jobs is reached."),
            msg("slurm-reason.QOSResourceLimit", "The QOS's limit on resources is reached."),
        ),
        temporary=True,
    ),
    **_explanations_by_name(
        (
            msg(
                "slurm-reason.DependencyNeverSatisfied",
                "The job's dependency on another job can no longer be satisfied. Stop the job and submit it again.",
            ),
            msg(
                "slurm-reason.ReservationDeleted",
                "The job's reservation was deleted. Ask the cluster's administrator.",
            ),
            msg(
                "slurm-reason.ReservationInvalid",
                "The job's reservation is not valid. Ask the cluster's administrator.",
            ),
            msg(
                "slurm-reason.PartitionNodeLimit",
                "The partition does not allow this number of nodes. Request another number.",
            ),
            msg(
                "slurm-reason.PartitionTimeLimit",
                "The time limit is longer than the partition allows. Set a shorter one or choose another namespace.",
            ),
            msg(
                "slurm-reason.PartitionConfig",
                "The partition does not allow what the job requests.",
            ),
            msg(
                "slurm-reason.BadConstraints",
                "No node of the partition can satisfy the request. Request less, or other node features.",
            ),
            msg(
                "slurm-reason.MaxMemPerLimit",
                "The job requests more memory per CPU or node than the partition allows. Request less.",
            ),
            msg(
                "slurm-reason.AccountNotAllowed",
                "The account may not use this partition. Ask the cluster's administrator.",
            ),
            msg(
                "slurm-reason.QOSNotAllowed",
                "The QOS may not be used in this partition. Ask the cluster's administrator.",
            ),
            msg(
                "slurm-reason.InvalidAccount",
                "The account is not valid. Ask the cluster's administrator.",
            ),
            msg(
                "slurm-reason.InvalidQOS",
                "The QOS is not valid. Ask the cluster's administrator.",
            ),
            msg(
                "slurm-reason.JobHoldMaxRequeue",
                "The job was requeued too often and is now held. Ask the cluster's administrator.",
            ),
            msg(
                "slurm-reason.BurstBufferOperation",
                "A burst buffer operation failed. Ask the cluster's administrator.",
            ),
            msg("slurm-reason.DeadLine", "The job could not finish before its deadline."),
            msg(
                "slurm-reason.JobLaunchFailure",
                "Slurm could not launch the job: its work directory is not usable, or the node has a fault.",
            ),
            msg("slurm-reason.NonZeroExitCode", "The job ended with a non-zero exit code."),
            msg("slurm-reason.RaisedSignal", "The job was ended by a signal."),
            msg("slurm-reason.TimeLimit", "The job reached its time limit."),
            msg("slurm-reason.InactiveLimit", "The job was inactive for too long."),
            msg("slurm-reason.OutOfMemory", "The job used more memory than it requested."),
            msg("slurm-reason.AssociationTimeLimit", "The account's limit on time is reached."),
            msg("slurm-reason.QOSTimeLimit", "The QOS's limit on time is reached."),
            msg(
                "slurm-reason.JobHeldUser",
                "The job is held. Release it with “scontrol release” to let it start.",
            ),
            msg(
                "slurm-reason.JobHeldAdmin",
                "An administrator holds the job. Ask the cluster's administrator.",
            ),
        ),
        temporary=False,
    ),
}
_BY_LOWER = {name.lower(): explanation for name, explanation in REASONS.items()}

# Matches QOSMaxGRESPerUser, AssocGrpCPURunMinutesLimit, MaxSubmitJobsPerAccount, QOSMinCpuNotSatisfied, …
_LIMIT = re.compile(
    r"""(?P<owner>QOS|Assoc|)(?P<kind>Grp|Max|Min)
        (?P<what>Cpu|Memory|Mem|Node|Energy|GRES|License|BB|Billing|Unknown
                |SubmitJobs?|Jobs?|WallDuration|Wall)
        (?P<time>RunMinutes|RunMins|Minutes|Mins|)
        (?P<scope>PerJob|PerNode|PerUser|PerAccount|)
        (?:Limit|NotSatisfied|)\Z""",
    re.VERBOSE | re.IGNORECASE,
)
_RESOURCE_NAMES = {
    "cpu": msg("slurm-limit.cpu", "CPU"),
    "mem": msg("slurm-limit.memory", "memory"),
    "memory": msg("slurm-limit.memory", "memory"),
    "node": msg("slurm-limit.node", "node"),
    "energy": msg("slurm-limit.energy", "energy"),
    "gres": msg("slurm-limit.gpu-generic-resource", "GPU (generic resource)"),
    "license": msg("slurm-limit.license", "license"),
    "bb": msg("slurm-limit.burst-buffer", "burst buffer"),
    "billing": msg("slurm-limit.billing", "billing"),
    "unknown": msg("slurm-limit.resource", "resource"),
    "job": msg("slurm-limit.running-job", "running job"),
    "jobs": msg("slurm-limit.running-job", "running job"),
    "submitjob": msg("slurm-limit.waiting-and-running-job", "waiting and running job"),
    "submitjobs": msg("slurm-limit.waiting-and-running-job", "waiting and running job"),
    "wall": msg("slurm-limit.run-time", "run time"),
    "wallduration": msg("slurm-limit.run-time", "run time"),
}
_OWNER_NAMES = {
    "qos": msg("slurm-limit.qos", "QOS"),
    "assoc": msg("slurm-limit.account", "account"),
    "": msg("slurm-limit.qos", "QOS"),
}
_SCOPE_NAMES = {
    "perjob": msg("slurm-limit.per-job", "per job"),
    "pernode": msg("slurm-limit.per-node", "per node"),
    "peruser": msg("slurm-limit.per-user", "per user"),
    "peraccount": msg("slurm-limit.per-account", "per account"),
}

_LIMIT_MESSAGES = {
    "shared": msg(
        "slurm-limit.shared",
        "The %(owner)s's %(what)s limit for all its jobs together is reached. The job starts when others end.",
    ),
    "budget": msg(
        "slurm-limit.budget",
        "The %(owner)s's budget of %(what)s time is used up. Ask the cluster's administrator.",
    ),
    "running_time": msg(
        "slurm-limit.running-time",
        "The running jobs of the %(owner)s have reached its limit on %(what)s time. The job starts when some of them end.",
    ),
    "per_one": msg(
        "slurm-limit.per-one",
        "The job exceeds the %(owner)s's %(what)s limit %(scope)s. Request less.",
    ),
    "own": msg(
        "slurm-limit.own",
        "The %(owner)s's %(what)s limit %(scope)s is reached. The job starts when your other jobs end.",
    ),
    "minimum": msg(
        "slurm-limit.minimum",
        "The job is below the %(owner)s's %(what)s minimum. Request more.",
    ),
}
_TEMPORARY_LIMITS = {"shared", "running_time", "own"}


def _limit_code(kind: str, what: str, time: str, scope: str) -> str:
    if kind == "min":
        return "minimum"
    if time.startswith("run"):
        return "running_time"
    if scope in ("perjob", "pernode") or (kind == "max" and time):
        return "per_one"
    # GrpWall and the …Minutes limits are budgets: they count the run time of all past jobs.
    if time or what == "wall":
        return "budget"
    if kind == "grp":
        return "shared"
    return "per_one" if what == "wallduration" else "own"


def _explain_limit(name: str) -> Explanation | None:
    match = _LIMIT.match(name)
    if match is None:
        return None
    part = {key: value.lower() for key, value in match.groupdict().items()}
    code = _limit_code(part["kind"], part["what"], part["time"], part["scope"])
    params = {
        "owner": _OWNER_NAMES[part["owner"]],
        "what": _RESOURCE_NAMES[part["what"]],
        "scope": _SCOPE_NAMES.get(
            part["scope"], _SCOPE_NAMES["peruser"] if code == "own" else _SCOPE_NAMES["perjob"]
        ),
    }
    return Explanation(_LIMIT_MESSAGES[code].fill(**params), code in _TEMPORARY_LIMITS)


# slurmctld may report free text (state_desc) instead of the name of a reason, with spaces or underscores.
# Beginning of the text → explanation.
_FREE_TEXT_REASONS: tuple[tuple[str, Explanation], ...] = (
    ("nodes required for job are down", REASONS["ReqNodeNotAvail"]),
    ("reqnodenotavail", REASONS["ReqNodeNotAvail"]),
    (
        "launch failed requeued held",
        Explanation(
            msg(
                "slurm-reason.launch-failed-held",
                "Slurm could not launch the job, requeued it and holds it. Ask the cluster's administrator.",
            ),
            temporary=False,
        ),
    ),
    (
        "user env retrieval failed",
        Explanation(
            msg(
                "slurm-reason.user-env-failed",
                "Slurm could not read your login environment on the node and holds the job. Ask the cluster's administrator.",
            ),
            temporary=False,
        ),
    ),
    (
        "job requeued in held state",
        Explanation(
            msg(
                "slurm-reason.requeued-held",
                "The job was requeued and is held until it is released.",
            ),
            temporary=False,
        ),
    ),
    ("partition is in down state", REASONS["PartitionDown"]),
    ("reservation deleted", REASONS["ReservationDeleted"]),
)


def explain_reason(reason: str) -> Explanation:
    """Return the explanation of a reason as squeue (%r) or sacct (Reason) prints it.

    The explanation of an unknown reason quotes what Slurm printed.
    """
    text = reason.strip().strip("()")
    if found := _BY_LOWER.get(text.lower()):
        return found
    if limit := _explain_limit(text):
        return limit
    normalized = text.replace("_", " ").lower()
    for prefix, explanation in _FREE_TEXT_REASONS:
        if normalized.startswith(prefix):
            return explanation
    if normalized in ("", "null", "n/a"):
        return REASONS["None"]
    return Explanation(
        msg("slurm-reason.other", "Slurm gives the reason “%(reason)s”.", reason=text)
    )
