"""The links on the way to the login node: name, port, host key, logins, UIDs, clocks."""

from __future__ import annotations

import socket
import time

from clusters.connections import account_on, check_person
from clusters.doctor.checks import Fault, Outcome, Patient
from clusters.errors import AuthFailed, HostKeyMismatch
from clusters.models import Cluster
from clusters.transport.identity import check_uid
from core.messages import Sentence, _

PORT_TIMEOUT_S = 10.0
# Certificates are backdated two minutes; seconds matter for timings that people see.
SKEW_WARN_S, SKEW_FAIL_S = 2.0, 60.0


def check_name(patient: Patient) -> str:
    host = patient.cluster.host
    try:
        found = socket.getaddrinfo(host, patient.cluster.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise Fault(
            _(
                "%(host)s does not resolve: %(reason)s.",
                host=host,
                reason=error.strerror or error,
            ),
            _("Correct “login node” of the cluster, or the machine's DNS or /etc/hosts."),
        ) from error
    return ", ".join(dict.fromkeys(str(entry[4][0]) for entry in found))


def check_port(patient: Patient) -> str:
    host, port = patient.cluster.host, patient.cluster.port
    remedy = _(
        "See that sshd runs on %(host)s and listens on port %(port)s, and that no firewall "
        "stands between.",
        host=host,
        port=port,
    )
    try:
        with socket.create_connection((host, port), timeout=PORT_TIMEOUT_S) as connection:
            banner = connection.recv(255).split(b"\n")[0].decode("ascii", "replace").strip()
    except TimeoutError as error:
        raise Fault(
            _("Port %(port)s of %(host)s does not answer.", port=port, host=host), remedy
        ) from error
    except OSError as error:
        raise Fault(
            _(
                "Port %(port)s of %(host)s: %(reason)s.",
                port=port,
                host=host,
                reason=error.strerror or error,
            ),
            remedy,
        ) from error
    if not banner.startswith("SSH-"):
        raise Fault(
            _("Port %(port)s of %(host)s is not an SSH server.", port=port, host=host),
            _("Correct the SSH port."),
        )
    return _("port %(port)s is open, %(banner)s", port=port, banner=banner)


def check_host_key(patient: Patient) -> str:
    pinned = patient.cluster.pinned_host_keys()
    if not pinned:
        raise Fault(
            _("No host key is pinned: nothing is sent to a machine that cannot prove who it is."),
            _(
                "Get the key with “ssh-keyscan -p %(port)s %(host)s”, compare it on the login node "
                "itself, and enter it in “pinned host keys”.",
                port=patient.cluster.port,
                host=patient.cluster.host,
            ),
        )
    try:
        patient.service().run(["true"])
    except HostKeyMismatch as error:
        raise Fault(
            error.user_message,
            _(
                "Enter the new key in “pinned host keys” only after you compared it on the login node itself."
            ),
        ) from error
    except AuthFailed as error:
        patient.first_contact = error  # the key was right: sshd went on to ask who we are
    return _("%(names)s, as pinned", names=", ".join(key.split()[0] for key in pinned))


def check_service_login(patient: Patient) -> str:
    name = patient.cluster.service_user
    if patient.first_contact is not None:
        raise Fault(
            _("sshd of %(host)s does not let %(name)s in.", host=patient.cluster.host, name=name),
            _login_remedy(patient.cluster, name),
        )
    transport = patient.service()
    account = patient.service_account = account_on(transport, transport.user)
    return _("logged in as %(name)s", name=account.name)


def _login_remedy(cluster: Cluster, name: str) -> Sentence:
    if cluster.key_file:
        return _(
            "See that %(path)s is there, readable by Sluice only, and that its public half is in "
            "~%(name)s/.ssh/authorized_keys on the login node.",
            path=cluster.key_file.format(user=name),
            name=name,
        )
    return _(
        "The login node's sshd must trust Sluice's certificate authority (“manage.py ssh_ca” prints "
        "the lines for sshd_config; reload sshd after it), and the Unix user %(name)s must exist there "
        "and be let in by AllowUsers, AllowGroups and PAM.",
        name=name,
    )


def check_accounts(patient: Patient) -> str:
    """Before anything is sent as a person."""
    known = [patient.service_account] if patient.service_account else []
    if patient.unix_user:
        patient.account = account_on(patient.service(), patient.unix_user)
        known.append(patient.account)
    for account in known:
        check_uid(account.name, account.uid, patient.cluster.uid_floor)
    if patient.account:
        check_person(patient.cluster, patient.account)
    uids = ", ".join(f"{account.name} {account.uid}" for account in known)
    return _("%(uids)s: not below %(uid_floor)s", uids=uids, uid_floor=patient.cluster.uid_floor)


def check_person_login(patient: Patient) -> str:
    account = patient.account
    if account is None:
        raise Fault(
            _("Nobody to try it with: no member of a namespace has a Unix account here."),
            _(
                "Name somebody: manage.py cluster check %(name)s --user PERSON",
                name=patient.cluster.name,
            ),
            Outcome.NOT_TRIED,
        )
    try:
        result = patient.person().run(["id", "-u"])
    except AuthFailed as error:
        raise Fault(
            _(
                "sshd of %(host)s lets the service account in, but not %(name)s.",
                host=patient.cluster.host,
                name=account.name,
            ),
            _login_remedy(patient.cluster, account.name),
        ) from error
    if result.text.strip() != str(account.uid):
        raise Fault(
            _(
                "Logged in as %(name)s, but the commands run as UID %(uid)s.",
                name=account.name,
                uid=result.text.strip()[:40],
            ),
            _(
                "Look for a ForceCommand or a shell profile on the login node that changes the user."
            ),
        )
    return _("logged in as %(name)s", name=account.name)


def check_clock(patient: Patient) -> str:
    transport = patient.service()
    before = time.time()
    result = transport.run(["date", "+%s.%N"])
    middle = (before + time.time()) / 2
    try:
        skew = float(result.text) - middle
    except ValueError as error:
        raise Fault(
            _("The login node's date says %(date)r.", date=result.text.strip()[:40]),
            _("GNU date is expected on the login node."),
        ) from error
    patient.clock_skew_s = round(skew, 3)
    seconds = f"{abs(skew):.1f}"
    found = (
        _("%(seconds)s s ahead of Sluice", seconds=seconds)
        if skew > 0
        else _("%(seconds)s s behind Sluice", seconds=seconds)
    )
    remedy = _("Run a time service (chrony, systemd-timesyncd) on both machines.")
    if abs(skew) >= SKEW_FAIL_S:
        raise Fault(
            _("The login node's clock is %(found)s: certificates will be refused.", found=found),
            remedy,
        )
    if abs(skew) >= SKEW_WARN_S:
        raise Fault(_("The login node's clock is %(found)s.", found=found), remedy, Outcome.WARN)
    return found
