"""The links on the way to the login node: name, port, host key, logins, UIDs, clocks."""

from __future__ import annotations

import socket
import time

from clusters.connect import account_on, check_person
from clusters.doctor.case import Fault, Outcome, Patient
from clusters.errors import AuthFailed, HostKeyMismatch
from clusters.identity import check_uid
from clusters.models import Cluster

PORT_TIMEOUT_S = 10.0
# Certificates are backdated two minutes; seconds matter for timings that people see.
SKEW_WARN_S, SKEW_FAIL_S = 2.0, 60.0


def check_name(patient: Patient) -> str:
    host = patient.cluster.host
    try:
        found = socket.getaddrinfo(host, patient.cluster.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise Fault(
            f"{host} does not resolve: {error.strerror or error}.",
            "Correct “login node” of the cluster, or the machine's DNS or /etc/hosts.",
        ) from error
    return ", ".join(dict.fromkeys(str(entry[4][0]) for entry in found))


def check_port(patient: Patient) -> str:
    host, port = patient.cluster.host, patient.cluster.port
    remedy = f"See that sshd runs on {host} and listens on port {port}, and that no firewall stands between."
    try:
        with socket.create_connection((host, port), timeout=PORT_TIMEOUT_S) as connection:
            banner = connection.recv(255).split(b"\n")[0].decode("ascii", "replace").strip()
    except TimeoutError as error:
        raise Fault(f"Port {port} of {host} does not answer.", remedy) from error
    except OSError as error:
        raise Fault(f"Port {port} of {host}: {error.strerror or error}.", remedy) from error
    if not banner.startswith("SSH-"):
        raise Fault(f"Port {port} of {host} is not an SSH server.", "Correct the SSH port.")
    return f"port {port} is open, {banner}"


def check_host_key(patient: Patient) -> str:
    pinned = patient.cluster.pinned_host_keys()
    if not pinned:
        raise Fault(
            "No host key is pinned: nothing is sent to a machine that cannot prove who it is.",
            f"Get the key with “ssh-keyscan -p {patient.cluster.port} {patient.cluster.host}”, compare "
            "it on the login node itself, and enter it in “pinned host keys”.",
        )
    try:
        patient.service().run(["true"])
    except HostKeyMismatch as error:
        raise Fault(
            error.user_message,
            "Enter the new key in “pinned host keys” only after you compared it on the login node itself.",
        ) from error
    except AuthFailed as error:
        patient.first_contact = error  # the key was right: sshd went on to ask who we are
    return f"{', '.join(key.split()[0] for key in pinned)}, as pinned"


def check_service_login(patient: Patient) -> str:
    name = patient.cluster.service_user
    if patient.first_contact is not None:
        raise Fault(
            f"sshd of {patient.cluster.host} does not let {name} in.",
            _login_remedy(patient.cluster, name),
        )
    transport = patient.service()
    account = patient.service_account = account_on(transport, transport.user)
    return f"logged in as {account.name}"


def _login_remedy(cluster: Cluster, name: str) -> str:
    if cluster.key_file:
        return (
            f"See that {cluster.key_file.format(user=name)} is there, readable by Sluice only, and "
            f"that its public half is in ~{name}/.ssh/authorized_keys on the login node."
        )
    return (
        "The login node's sshd must trust Sluice's certificate authority (“manage.py ssh_ca” prints "
        f"the lines for sshd_config; reload sshd after it), and the Unix user {name} must exist there "
        "and be let in by AllowUsers, AllowGroups and PAM."
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
    return f"{uids}: not below {patient.cluster.uid_floor}"


def check_person_login(patient: Patient) -> str:
    account = patient.account
    if account is None:
        raise Fault(
            "Nobody to try it with: no member of a namespace has a Unix account here.",
            f"Name somebody: manage.py cluster check {patient.cluster.name} --user PERSON",
            Outcome.NOT_TRIED,
        )
    try:
        result = patient.person().run(["id", "-u"])
    except AuthFailed as error:
        raise Fault(
            f"sshd of {patient.cluster.host} lets the service account in, but not {account.name}.",
            _login_remedy(patient.cluster, account.name),
        ) from error
    if result.text.strip() != str(account.uid):
        raise Fault(
            f"Logged in as {account.name}, but the commands run as UID {result.text.strip()[:40]}.",
            "Look for a ForceCommand or a shell profile on the login node that changes the user.",
        )
    return f"logged in as {account.name}"


def check_clock(patient: Patient) -> str:
    transport = patient.service()
    before = time.time()
    result = transport.run(["date", "+%s.%N"])
    middle = (before + time.time()) / 2
    try:
        skew = float(result.text) - middle
    except ValueError as error:
        raise Fault(
            f"The login node's date says {result.text.strip()[:40]!r}.",
            "GNU date is expected on the login node.",
        ) from error
    patient.clock_skew_s = round(skew, 3)
    found = f"{abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} Sluice"
    remedy = "Run a time service (chrony, systemd-timesyncd) on both machines."
    if abs(skew) >= SKEW_FAIL_S:
        raise Fault(f"The login node's clock is {found}: certificates will be refused.", remedy)
    if abs(skew) >= SKEW_WARN_S:
        raise Fault(f"The login node's clock is {found}.", remedy, Outcome.WARN)
    return found
