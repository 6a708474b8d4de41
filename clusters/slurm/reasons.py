"""Explains why a job waits or how it ended: Slurm's reason codes and exit codes.

Every name of `enum job_state_reason` up to 26.05 is understood. Each explanation is a template and its
parameters, so that few templates are translated instead of two hundred sentences. Pure.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

from clusters.slurm.states import ReportedState
from core.messages import Message, _


@dataclass(frozen=True, slots=True)
class Explanation:
    """One sentence for a lab member, with what is needed to say it in another language."""

    code: str  # stable; names the template
    template: Message
    params: Mapping[str, str | int] = field(default_factory=dict)
    temporary: bool = True  # waiting can help; False: somebody must change something
    held: bool = False

    @property
    def message(self) -> Message:
        return Message(self.template, self.params)


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """Slurm's `3:0`: exit status, and the signal that killed (0: none)."""

    status: int
    signal: int = 0

    @property
    def signal_name(self) -> str:
        try:
            return signal.Signals(self.signal).name
        except ValueError:
            return f"signal {self.signal}"


def _build_reasons() -> dict[str, Explanation]:
    rows: list[tuple[str, Message, bool]] = [
        # name, sentence, can pass by itself
        ("None", _("Slurm has not looked at the job yet."), True),
        ("Priority", _("Other jobs with a higher priority come first."), True),
        ("Resources", _("The job is next in line and waits for nodes to become free."), True),
        ("Dependency", _("The job waits for another job that it depends on."), True),
        (
            "DependencyNeverSatisfied",
            _(
                "The job depends on another job in a way that can no longer come true. Stop it and submit it again."
            ),
            False,
        ),
        (
            "BeginTime",
            _(
                "The job waits for its start time, or a short while after being put back into the queue."
            ),
            True,
        ),
        ("Prolog", _("The nodes are being prepared for the job."), True),
        (
            "Cleaning",
            _(
                "The job was put back into the queue and its previous run is still being cleaned up."
            ),
            True,
        ),
        ("Licenses", _("The job waits for software licenses."), True),
        ("Reservation", _("The job waits for its reservation to begin."), True),
        (
            "ReservationDeleted",
            _("The job's reservation was deleted. Ask the cluster's administrator."),
            False,
        ),
        (
            "ReservationInvalid",
            _("The job's reservation is not valid. Ask the cluster's administrator."),
            False,
        ),
        (
            "ReqNodeNotAvail",
            _(
                "Nodes that the job needs are down, drained or reserved; it starts when they are back."
            ),
            True,
        ),
        ("NodeDown", _("A node that the job needs is down."), True),
        ("FrontEndDown", _("No front-end node is available."), True),
        (
            "SchedDefer",
            _("Slurm puts off its first look at new jobs; the job starts a little later."),
            True,
        ),
        (
            "PartitionDown",
            _("The partition is closed for the moment; the job starts when it is opened."),
            True,
        ),
        ("PartitionInactive", _("The partition is switched off for the moment."), True),
        (
            "PartitionNodeLimit",
            _(
                "The job asks for more (or fewer) nodes than its partition allows. Ask for another number of nodes."
            ),
            False,
        ),
        (
            "PartitionTimeLimit",
            _(
                "The job asks for more time than its partition allows. Ask for less time or another partition."
            ),
            False,
        ),
        (
            "PartitionConfig",
            _("The job asks for something that its partition does not allow."),
            False,
        ),
        (
            "BadConstraints",
            _(
                "No node of the partition can ever give what the job asks for. Ask for less or for other node features."
            ),
            False,
        ),
        ("Constraints", _("No node meets the job's constraints at the moment."), True),
        (
            "MaxMemPerLimit",
            _("The job asks for more memory per CPU or node than the partition allows."),
            False,
        ),
        (
            "AccountNotAllowed",
            _("The account may not use this partition. Ask the cluster's administrator."),
            False,
        ),
        (
            "QOSNotAllowed",
            _("The QOS may not be used in this partition. Ask the cluster's administrator."),
            False,
        ),
        (
            "InvalidAccount",
            _("The account is not valid (any more). Ask the cluster's administrator."),
            False,
        ),
        (
            "InvalidQOS",
            _("The QOS is not valid (any more). Ask the cluster's administrator."),
            False,
        ),
        ("QOSUsageThreshold", _("The account has used more than the QOS allows for now."), True),
        ("AccountingPolicy", _("A limit of the account or the QOS holds the job back."), True),
        ("JobArrayTaskLimit", _("As many tasks of this job array run as it allows at once."), True),
        (
            "JobHoldMaxRequeue",
            _(
                "The job was put back into the queue too often and is now held. Ask the cluster's administrator."
            ),
            False,
        ),
        ("BurstBufferResources", _("The job waits for burst buffer space."), True),
        ("BurstBufferStageIn", _("The job's data is being copied to the burst buffer."), True),
        (
            "BurstBufferOperation",
            _("A burst buffer operation failed. Ask the cluster's administrator."),
            False,
        ),
        ("PowerNotAvail", _("Not enough electrical power is available to start the job."), True),
        ("PowerReserved", _("The electrical power is reserved for other jobs."), True),
        ("MaxPoweredUpNodes", _("As many nodes are powered up as the cluster allows."), True),
        ("MpiPortsBusy", _("The network ports that MPI needs are in use on the nodes."), True),
        ("FedJobLock", _("The job waits for the other clusters of the federation."), True),
        ("DeadLine", _("The job could not finish before its deadline."), False),
        # What ended a job, in the same field.
        ("SystemFailure", _("Slurm or a node of it failed."), True),
        (
            "JobLaunchFailure",
            _("The job could not be launched: a bad working directory, or a fault of the node."),
            False,
        ),
        ("NonZeroExitCode", _("The job ended with an exit code that is not zero."), False),
        ("RaisedSignal", _("The job was ended by a signal."), False),
        ("TimeLimit", _("The job reached its time limit."), False),
        ("InactiveLimit", _("The job was inactive for too long."), False),
        ("OutOfMemory", _("The job used more memory than it asked for."), False),
        # Before 2.x names of association and QOS limits, still in the enum.
        ("AssociationJobLimit", _("The account's limit on running jobs is reached."), True),
        ("AssociationResourceLimit", _("The account's limit on resources is reached."), True),
        ("AssociationTimeLimit", _("The account's limit on time is reached."), False),
        ("QOSJobLimit", _("The QOS's limit on running jobs is reached."), True),
        ("QOSResourceLimit", _("The QOS's limit on resources is reached."), True),
        ("QOSTimeLimit", _("The QOS's limit on time is reached."), False),
    ]
    table = {name: Explanation(name, text, {}, temporary) for name, text, temporary in rows}
    for name, text in (
        ("JobHeldUser", _("The job is held; release it to let it start.")),
        ("JobHeldAdmin", _("An administrator holds the job. Ask the cluster's administrator.")),
    ):
        table[name] = Explanation(name, text, {}, temporary=False, held=True)
    return table


REASONS: dict[str, Explanation] = _build_reasons()
_BY_LOWER = {name.lower(): explanation for name, explanation in REASONS.items()}

# QOSMaxGRESPerUser, AssocGrpCPURunMinutesLimit, MaxSubmitJobsPerAccount, QOSMinCpuNotSatisfied, …
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
    "cpu": _("CPU"),
    "mem": _("memory"),
    "memory": _("memory"),
    "node": _("node"),
    "energy": _("energy"),
    "gres": _("GPU (generic resource)"),
    "license": _("license"),
    "bb": _("burst buffer"),
    "billing": _("billing"),
    "unknown": _("resource"),
    "job": _("running job"),
    "jobs": _("running job"),
    "submitjob": _("waiting and running job"),
    "submitjobs": _("waiting and running job"),
    "wall": _("run time"),
    "wallduration": _("run time"),
}
_OWNER_NAMES = {"qos": _("QOS"), "assoc": _("account"), "": _("QOS")}
_SCOPE_NAMES = {
    "perjob": _("per job"),
    "pernode": _("per node"),
    "peruser": _("per user"),
    "peraccount": _("per account"),
}

_LIMIT_TEMPLATES = {
    "limit_shared": _(
        "The %(owner)s's %(what)s limit for all its jobs together is reached; the job starts when others end."
    ),
    "limit_budget": _(
        "The %(owner)s's budget of %(what)s time is used up. Ask the cluster's administrator."
    ),
    "limit_running_time": (
        _(
            "The running jobs of the %(owner)s already hold as much %(what)s time as is allowed; "
            "the job starts when some of them end."
        )
    ),
    "limit_per_one": _(
        "The job asks for more than the %(owner)s's %(what)s limit %(scope)s allows. Ask for less."
    ),
    "limit_own": _(
        "The %(owner)s's %(what)s limit %(scope)s is reached; the job starts when your other jobs end."
    ),
    "limit_minimum": _(
        "The job asks for less than the %(owner)s's %(what)s minimum. Ask for more."
    ),
}
_TEMPORARY_LIMITS = {"limit_shared", "limit_running_time", "limit_own"}


def _limit_code(kind: str, what: str, time: str, scope: str) -> str:
    if kind == "min":
        return "limit_minimum"
    if time.startswith("run"):
        return "limit_running_time"
    if scope in ("perjob", "pernode") or (kind == "max" and time):
        return "limit_per_one"
    # GrpWall counts the run time of all jobs ever, as the …Minutes budgets do.
    if time or what == "wall":
        return "limit_budget"
    if kind == "grp":
        return "limit_shared"
    return "limit_per_one" if what == "wallduration" else "limit_own"


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
            part["scope"], _("per user") if code == "limit_own" else _("per job")
        ),
    }
    return Explanation(code, _LIMIT_TEMPLATES[code], params, code in _TEMPORARY_LIMITS)


# slurmctld puts free text instead of a name into the same field (state_desc); blanks may be underscores.
_FREE_TEXT_REASONS: tuple[tuple[str, Explanation], ...] = (
    ("nodes required for job are down", REASONS["ReqNodeNotAvail"]),
    ("reqnodenotavail", REASONS["ReqNodeNotAvail"]),
    (
        "launch failed requeued held",
        Explanation(
            "launch_failed_held",
            _(
                "The job could not be launched, was put back into the queue and is held. Ask the cluster's administrator."
            ),
            temporary=False,
            held=True,
        ),
    ),
    (
        "user env retrieval failed",
        Explanation(
            "user_env_failed",
            _(
                "Your login environment could not be read on the node; the job is held. Ask the cluster's administrator."
            ),
            temporary=False,
            held=True,
        ),
    ),
    (
        "job requeued in held state",
        Explanation(
            "requeued_held",
            _("The job was put back into the queue and is held until it is released."),
            temporary=False,
            held=True,
        ),
    ),
    ("partition is in down state", REASONS["PartitionDown"]),
    ("reservation deleted", REASONS["ReservationDeleted"]),
)


def explain_reason(reason: str) -> Explanation:
    """Slurm's reason (squeue %r, sacct Reason) in plain words; unknown ones in Slurm's own words."""
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
    return Explanation("other", _("Slurm gives the reason “%(words)s”."), {"words": text})


_END_TEMPLATES = {
    "COMPLETED": _("The job completed."),
    "TIMEOUT": _(
        "The job reached its time limit and was stopped. Ask for more time, or save checkpoints."
    ),
    "OUT_OF_MEMORY": _(
        "The job used more memory than it asked for and was ended. Ask for more memory."
    ),
    "NODE_FAIL": _("A node of the job failed."),
    "PREEMPTED": _("A job of higher priority took the job's nodes."),
    "BOOT_FAIL": _("A node of the job could not be started."),
    "DEADLINE": _("The job could not finish before its deadline."),
}


def explain_end(reported: ReportedState, exit_status: ExitStatus | None = None) -> Explanation:
    """How a job ended, in one sentence; `seen` must be an end state."""
    name = reported.name
    transient = reported.state.transient
    if name == "CANCELLED":
        if reported.cancelled_by_uid is None:
            return Explanation("cancelled", _("The job was cancelled."), {}, False)
        canceller_uid = reported.cancelled_by_uid
        if canceller_uid == 0:
            return Explanation(
                "cancelled_by_root", _("The cluster's administrator cancelled the job."), {}, False
            )
        return Explanation(
            "cancelled_by",
            _("The job was cancelled by the user with UID %(uid)s."),
            {"uid": canceller_uid},
            False,
        )
    if name == "FAILED" and exit_status is not None:
        if exit_status.signal:
            return Explanation(
                "failed_signal",
                _("The job was ended by %(signal)s."),
                {"signal": exit_status.signal_name},
                False,
            )
        if exit_status.status:
            return Explanation(
                "failed_exit",
                _("The job failed with exit code %(exit_code)s."),
                {"exit_code": exit_status.status},
                False,
            )
    return Explanation(
        name.lower(), _END_TEMPLATES.get(name) or Message(reported.state.message), {}, transient
    )
