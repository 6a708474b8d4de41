"""The doctor: tests every link between Sluice and a cluster, in order, and says what to do.

`examine` runs the links and gives lines; it prints nothing. A link that needs a broken one is "not tried".
Connections are fresh ones, never those of the pool: an open connection would hide a login that no
longer works. Whatever a check writes on the cluster it removes again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from django.contrib.auth import get_user_model
from django.utils import timezone

from clusters.access import roles_of
from clusters.connections import commands_of, fresh_door
from clusters.doctor import login_checks, slurm_checks
from clusters.doctor.checks import Fault, Line, Link, Outcome, Patient
from clusters.errors import ClusterError, IdentityRefused, SlurmUnavailable
from clusters.models import Cluster, Membership, Namespace, store_status, unix_user_for
from core.messages import _, stored

if TYPE_CHECKING:
    from accounts.models import User

__all__ = [
    "LINKS",
    "TITLES",
    "Line",
    "Link",
    "Outcome",
    "Patient",
    "all_ok",
    "examine",
    "examine_cluster",
    "to_json",
    "whom_to_try",
]


def reached_by_ssh(cluster: Cluster) -> bool:
    return cluster.kind == Cluster.Kind.SSH


def read_by_pyslurm(cluster: Cluster) -> bool:
    return cluster.use_pyslurm


LINKS: tuple[Link, ...] = (
    Link("name", _("Name"), login_checks.check_name, applies=reached_by_ssh),
    Link("port", _("Port"), login_checks.check_port, ("name",), applies=reached_by_ssh),
    Link(
        "host_key",
        _("Host key"),
        login_checks.check_host_key,
        ("port",),
        _("See the login node's sshd log for why it broke off."),
        applies=reached_by_ssh,
    ),
    Link(
        "service_login",
        _("Login of the service account"),
        login_checks.check_service_login,
        ("host_key",),
        _("Correct “service account” of the cluster; it must be a Unix user there."),
    ),
    Link(
        "accounts",
        _("Unix accounts"),
        login_checks.check_accounts,
        ("service_login",),
        _(
            "Map the person to a Unix account of their own on their page. “Lowest UID” of the "
            "cluster says where people's accounts begin."
        ),
    ),
    Link("person_login", _("Login of a person"), login_checks.check_person_login, ("accounts",)),
    Link("clock", _("Clocks"), login_checks.check_clock, ("service_login",)),
    Link(
        "version",
        _("Slurm's release"),
        slurm_checks.check_version,
        ("service_login",),
        _("Set “directory of Slurm's commands” of the cluster, or install Slurm's client there."),
    ),
    Link(
        "controller",
        _("Controller"),
        slurm_checks.check_controller,
        ("version",),
        _("Start slurmctld."),
    ),
    Link(
        "pyslurm",
        _("pyslurm"),
        slurm_checks.check_pyslurm,
        ("controller",),
        _("Install the pyslurm of Slurm's own release, or switch “read with pyslurm” off."),
        applies=read_by_pyslurm,
    ),
    Link(
        "accounting",
        _("Accounting"),
        slurm_checks.check_accounting,
        ("controller",),
        _("Start slurmdbd."),
    ),
    Link("operator", _("Operator rights"), slurm_checks.check_operator, ("accounting",)),
    Link("partitions", _("Partitions"), slurm_checks.check_partitions, ("controller",)),
    Link("work_root", _("Work root"), slurm_checks.check_work_root, ("person_login",)),
    Link(
        "compute_node",
        _("Work root on a node"),
        slurm_checks.check_compute_node,
        ("work_root", "partitions"),
    ),
    Link("runtime", _("Container runtime"), slurm_checks.check_runtime, ("compute_node",)),
)
TITLES = {link.key: link.title for link in LINKS}


def examine(patient: Patient) -> Iterator[Line]:
    """The lines, one by one as they are found."""
    links = [link for link in LINKS if link.applies(patient.cluster)]
    trying = {link.key for link in links}
    broken: set[str] = set()
    with _cleaning_up(patient):
        for link in links:
            missing = [key for key in link.needs if key in broken and key in trying]
            line = _not_tried(link, missing[0]) if missing else _try(link, patient)
            if line.outcome in (Outcome.FAIL, Outcome.NOT_TRIED):
                broken.add(link.key)
            yield line


def _try(link: Link, patient: Patient) -> Line:
    found = partial(Line, link.key, link.title)
    try:
        return found(Outcome.OK, link.check(patient))
    except Fault as fault:
        return found(fault.outcome, fault.found, fault.remedy)
    except SlurmUnavailable as error:
        return found(Outcome.FAIL, error.user_message, link.remedy or _("Start Slurm's daemons."))
    except ClusterError as error:
        words = error.user_message
        if error.detail:
            words = _("%(message)s (%(detail)s)", message=words, detail=error.detail[:200])
        return found(Outcome.FAIL, words, link.remedy or _("Look at the link before it."))


def _not_tried(link: Link, needed: str) -> Line:
    found = _("needs “%(title)s”, which does not hold", title=TITLES[needed])
    return Line(link.key, link.title, Outcome.NOT_TRIED, found)


@contextmanager
def _cleaning_up(patient: Patient) -> Iterator[None]:
    try:
        yield
    finally:
        if patient.check_file:
            # Should the cluster no longer answer, the lines already say so.
            with suppress(ClusterError):
                patient.person().run(["rm", "-f", patient.check_file, f"{patient.check_file}.back"])


def examine_cluster(
    cluster: Cluster, *, unix_user: str, namespaces: Sequence[Namespace]
) -> Iterator[Line]:
    """Examine by fresh connections, and keep the result for the administrators' pages.

    A node is tried in the first of the namespaces.
    """
    lines: list[Line] = []
    with fresh_door(cluster) as door:
        patient = Patient(cluster, door, commands_of(cluster), namespaces, unix_user)
        for line in examine(patient):
            lines.append(line)
            yield line
    observed: dict[str, Any] = {"doctor": to_json(lines), "doctor_at": timezone.now()}
    if patient.slurm_version:
        observed["slurm_version"] = patient.slurm_version
    if patient.clock_skew_s is not None:
        observed["clock_skew_s"] = patient.clock_skew_s
    store_status(cluster, **observed)


def whom_to_try(cluster: Cluster, wanted: str = "") -> tuple[str, list[Namespace]]:
    """The Unix user to try (the one asked for, or of the first member who has one) and the namespaces,
    theirs first: that is where a node is tried. Raises IdentityRefused for a person without an account."""
    namespaces = list(cluster.namespaces.filter(active=True))
    people = get_user_model().objects.filter(is_active=True).order_by("username")
    if wanted:
        person = people.filter(username=wanted).first()
        if person is None:
            # A Unix user by name; the doctor's own links refuse root and low UIDs.
            return wanted, namespaces
        return unix_user_for(person, cluster), _theirs_first(person, namespaces)
    members = Membership.objects.filter(namespace__in=namespaces)
    for person in people.filter(pk__in=members.exclude(role=Membership.Role.VIEWER).values("user")):
        try:
            return unix_user_for(person, cluster), _theirs_first(person, namespaces)
        except IdentityRefused:
            continue
    return "", namespaces


def _theirs_first(person: User, namespaces: list[Namespace]) -> list[Namespace]:
    roles = roles_of(person)
    return sorted(namespaces, key=lambda namespace: namespace.pk not in roles)


def all_ok(lines: Sequence[Line]) -> bool:
    return all(line.outcome is Outcome.OK for line in lines)


def to_json(lines: Sequence[Line]) -> dict[str, Any]:
    """As kept in ClusterStatus.doctor, for readers of any language."""
    rows = [
        {
            "key": line.key,
            "title": stored(line.title),
            "outcome": line.outcome,
            "found": stored(line.found),
            "remedy": stored(line.remedy),
        }
        for line in lines
    ]
    return {"ok": all_ok(lines), "lines": rows}
