"""The doctor: runs the checks of a cluster in order and reports for each what was found and what to do.

`run_checks` yields the results and prints nothing. If a check fails, the checks that require it are "not tried". The
doctor opens new connections, because an open one would hide that logins no longer work. It removes its test files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from django.contrib.auth import get_user_model
from django.utils import timezone

from clusters.access import SUBMITTER_ROLES, roles_of
from clusters.connections import create_transport_factory, slurm_commands_for
from clusters.doctor import login_checks, slurm_checks
from clusters.doctor.check_types import Check, CheckContext, CheckFailed, CheckOutcome, CheckResult
from clusters.errors import ClusterError, IdentityRefused, SlurmUnavailable
from clusters.models import Cluster, Membership, Namespace, store_status, unix_user_for
from core.messages import msg, serialize

if TYPE_CHECKING:
    from accounts.models import User

__all__ = [
    "CHECKS",
    "CHECK_TITLES",
    "Check",
    "CheckContext",
    "CheckOutcome",
    "CheckResult",
    "all_ok",
    "check_cluster",
    "run_checks",
    "select_test_account",
    "to_json",
]


CHECKS: tuple[Check, ...] = (
    Check("name", msg("doctor.name", "Name"), login_checks.check_host_name),
    Check("port", msg("doctor.port", "Port"), login_checks.check_port, ("name",)),
    Check(
        "host_key",
        msg("doctor.host-key", "Host key"),
        login_checks.check_host_key,
        ("port",),
        msg("doctor.see-login-node-sshd", "Check the login node's sshd log for the cause."),
    ),
    Check(
        "service_login",
        msg("doctor.login-service-account", "Login of the service account"),
        login_checks.check_service_login,
        ("host_key",),
        msg(
            "doctor.correct-service-account-cluster",
            "Correct the cluster's “service account”; it must be a Unix user there.",
        ),
    ),
    Check(
        "accounts",
        msg("doctor.unix-accounts", "Unix accounts"),
        login_checks.check_accounts,
        ("service_login",),
        msg(
            "doctor.map-person-unix-account",
            "Map the person to a Unix account of their own on their page. “Lowest UID” of the "
            "cluster says where people's accounts begin.",
        ),
    ),
    Check(
        "person_login",
        msg("doctor.login-person", "Login of a person"),
        login_checks.check_person_login,
        ("accounts",),
    ),
    Check("clock", msg("doctor.clocks", "Clocks"), login_checks.check_clock, ("service_login",)),
    Check(
        "version",
        msg("doctor.slurm-release", "Slurm's release"),
        slurm_checks.check_version,
        ("service_login",),
        msg(
            "doctor.set-directory-slurm-commands",
            "Set “directory of Slurm's commands” of the cluster, or install Slurm's client there.",
        ),
    ),
    Check(
        "controller",
        msg("doctor.controller", "Controller"),
        slurm_checks.check_controller,
        ("version",),
        msg("doctor.start-slurmctld", "Start slurmctld."),
    ),
    Check(
        "pyslurm",
        msg("doctor.pyslurm", "pyslurm"),
        slurm_checks.check_pyslurm,
        ("controller",),
        msg(
            "doctor.install-pyslurm-slurm-own",
            "Install the pyslurm of Slurm's own release, or switch “read with pyslurm” off.",
        ),
        applies_to=lambda cluster: cluster.use_pyslurm,
    ),
    Check(
        "accounting",
        msg("doctor.accounting", "Accounting"),
        slurm_checks.check_accounting,
        ("controller",),
        msg("doctor.start-slurmdbd", "Start slurmdbd."),
    ),
    Check(
        "operator",
        msg("doctor.operator-rights", "Operator rights"),
        slurm_checks.check_operator,
        ("accounting",),
    ),
    Check(
        "partitions",
        msg("doctor.partitions", "Partitions"),
        slurm_checks.check_partitions,
        ("controller",),
    ),
    Check(
        "work_root",
        msg("doctor.work-root", "Work root"),
        slurm_checks.check_work_root,
        ("person_login",),
    ),
    Check(
        "compute_node",
        msg("doctor.work-root-node", "Work root on a node"),
        slurm_checks.check_compute_node,
        ("work_root", "partitions"),
    ),
    Check(
        "runtime",
        msg("doctor.container-runtime", "Container runtime"),
        slurm_checks.check_runtime,
        ("compute_node",),
    ),
)
CHECK_TITLES = {check.key: check.title for check in CHECKS}


def run_checks(context: CheckContext) -> Iterator[CheckResult]:
    """Run the checks that apply to the cluster and yield each result as soon as it is known."""
    failed_keys: set[str] = set()
    try:
        for check in CHECKS:
            if not check.applies_to(context.cluster):
                continue
            failed_requirement = next((key for key in check.requires if key in failed_keys), None)
            result = (
                _skipped_result(check, failed_requirement)
                if failed_requirement
                else _run_check(check, context)
            )
            if result.outcome in (CheckOutcome.FAIL, CheckOutcome.NOT_TRIED):
                failed_keys.add(check.key)
            yield result
    finally:
        _remove_test_files(context)


def _run_check(check: Check, context: CheckContext) -> CheckResult:
    make_result = partial(CheckResult, check.key, check.title)
    try:
        return make_result(CheckOutcome.OK, check.run(context))
    except CheckFailed as failure:
        return make_result(failure.outcome, failure.found, failure.remedy)
    except SlurmUnavailable as error:
        return make_result(
            CheckOutcome.FAIL,
            error.user_message,
            check.remedy or msg("doctor.start-slurm-daemons", "Start Slurm's daemons."),
        )
    except ClusterError as error:
        message = error.user_message
        if error.detail:
            message = msg(
                "doctor.text",
                "%(message)s (%(detail)s)",
                message=message,
                detail=error.detail[:200],
            )
        return make_result(
            CheckOutcome.FAIL,
            message,
            check.remedy or msg("doctor.look-link-before", "Check the previous result first."),
        )


def _skipped_result(check: Check, failed_key: str) -> CheckResult:
    found = msg(
        "doctor.needs-does-not-hold",
        "requires the check “%(title)s”, which failed",
        title=CHECK_TITLES[failed_key],
    )
    return CheckResult(check.key, check.title, CheckOutcome.NOT_TRIED, found)


def _remove_test_files(context: CheckContext) -> None:
    path = context.test_file
    if path:
        # If the cluster does not respond any more, an earlier result reports it.
        with suppress(ClusterError):
            context.user_transport().run(["rm", "-f", path, f"{path}.back"])


def check_cluster(
    cluster: Cluster, *, unix_user: str, namespaces: Sequence[Namespace]
) -> Iterator[CheckResult]:
    """Run the checks with new connections, yield the results and store them for the administrators' pages.

    The check of a compute node submits to the first of `namespaces`.
    """
    results: list[CheckResult] = []
    transport_factory = create_transport_factory(cluster)
    context = CheckContext(
        cluster, transport_factory, slurm_commands_for(cluster), namespaces, unix_user
    )
    try:
        for result in run_checks(context):
            results.append(result)
            yield result
    finally:
        transport_factory.close_all()
    observed: dict[str, Any] = {"doctor": to_json(results), "doctor_at": timezone.now()}
    if context.slurm_version:
        observed["slurm_version"] = context.slurm_version
    if context.clock_skew_s is not None:
        observed["clock_skew_s"] = context.clock_skew_s
    store_status(cluster, **observed)


def select_test_account(cluster: Cluster, requested_user: str = "") -> tuple[str, list[Namespace]]:
    """Return the Unix user for the login check, and the cluster's namespaces, those of that person first.

    The person is `requested_user`, or without one the first member of a namespace who has a Unix user on the cluster.
    Raises IdentityRefused if the requested person has none.
    """
    namespaces = list(cluster.namespaces.filter(active=True))
    people = get_user_model().objects.filter(is_active=True).order_by("username")
    if requested_user:
        person = people.filter(username=requested_user).first()
        if person is None:
            # Not a user of Sluice: the name of a Unix user. The checks refuse root and low UIDs.
            return requested_user, namespaces
        return unix_user_for(person, cluster), _member_namespaces_first(person, namespaces)
    submitters = Membership.objects.filter(namespace__in=namespaces, role__in=SUBMITTER_ROLES)
    for person in people.filter(pk__in=submitters.values("user")):
        try:
            return unix_user_for(person, cluster), _member_namespaces_first(person, namespaces)
        except IdentityRefused:
            continue
    return "", namespaces


def _member_namespaces_first(person: User, namespaces: list[Namespace]) -> list[Namespace]:
    roles = roles_of(person)
    return sorted(namespaces, key=lambda namespace: namespace.pk not in roles)


def all_ok(results: Sequence[CheckResult]) -> bool:
    return all(result.outcome is CheckOutcome.OK for result in results)


def to_json(results: Sequence[CheckResult]) -> dict[str, Any]:
    """JSON for the field `doctor` of ClusterStatus. Messages are stored as code and parameters."""
    rows = [
        {
            "key": result.key,
            "title": serialize(result.title),
            "outcome": result.outcome,
            "found": serialize(result.found),
            "remedy": serialize(result.remedy),
        }
        for result in results
    ]
    return {"ok": all_ok(results), "lines": rows}
