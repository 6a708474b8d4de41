"""Checks of the connection to the login node: name, port, host key, logins, UIDs, clocks."""

from __future__ import annotations

import socket
import time

from clusters.connections import check_may_act_as, fetch_passwd_entry
from clusters.doctor.checks import CheckContext, CheckFailed, CheckOutcome
from clusters.errors import AuthFailed, HostKeyMismatch
from clusters.models import Cluster
from clusters.transport.identity import check_uid
from core.messages import Message, msg

PORT_TIMEOUT_S = 10.0
# Certificates tolerate a clock skew of two minutes (CLOCK_TOLERANCE_S); displayed times are wrong after a few seconds.
SKEW_WARN_S, SKEW_FAIL_S = 2.0, 60.0


def check_host_name(context: CheckContext) -> str:
    host = context.cluster.host
    try:
        found = socket.getaddrinfo(host, context.cluster.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise CheckFailed(
            msg(
                "doctor.does-not-resolve",
                "%(host)s does not resolve: %(reason)s.",
                host=host,
                reason=error.strerror or error,
            ),
            msg(
                "doctor.correct-login-node-cluster",
                "Correct “login node” of the cluster, or the machine's DNS or /etc/hosts.",
            ),
        ) from error
    return ", ".join(dict.fromkeys(str(entry[4][0]) for entry in found))


def check_port(context: CheckContext) -> str:
    host, port = context.cluster.host, context.cluster.port
    remedy = msg(
        "doctor.see-sshd-runs-listens",
        "Check that sshd runs on %(host)s, listens on port %(port)s and is not blocked by a firewall.",
        host=host,
        port=port,
    )
    try:
        with socket.create_connection((host, port), timeout=PORT_TIMEOUT_S) as connection:
            banner = connection.recv(255).split(b"\n")[0].decode("ascii", "replace").strip()
    except TimeoutError as error:
        raise CheckFailed(
            msg(
                "doctor.port-does-not-answer",
                "Port %(port)s of %(host)s does not respond.",
                port=port,
                host=host,
            ),
            remedy,
        ) from error
    except OSError as error:
        raise CheckFailed(
            msg(
                "doctor.port-2",
                "Port %(port)s of %(host)s: %(reason)s.",
                port=port,
                host=host,
                reason=error.strerror or error,
            ),
            remedy,
        ) from error
    if not banner.startswith("SSH-"):
        raise CheckFailed(
            msg(
                "doctor.port-not-ssh-server",
                "Port %(port)s of %(host)s is not an SSH server.",
                port=port,
                host=host,
            ),
            msg("doctor.correct-ssh-port", "Correct the SSH port."),
        )
    return msg("doctor.port-open", "port %(port)s is open, %(banner)s", port=port, banner=banner)


def check_host_key(context: CheckContext) -> str:
    pinned = context.cluster.pinned_host_keys()
    if not pinned:
        raise CheckFailed(
            msg(
                "doctor.no-host-key-pinned",
                "No host key is pinned. Sluice connects only to hosts with a pinned key.",
            ),
            msg(
                "doctor.get-key-ssh-keyscan",
                "Get the key with “ssh-keyscan -p %(port)s %(host)s”, compare it on the login node "
                "itself, and enter it in “pinned host keys”.",
                port=context.cluster.port,
                host=context.cluster.host,
            ),
        )
    try:
        context.service_transport().run(["true"])
    except HostKeyMismatch as error:
        raise CheckFailed(
            error.user_message,
            msg(
                "doctor.enter-new-key-pinned",
                "Enter the new key in “pinned host keys” only after you compared it on the login node itself.",
            ),
        ) from error
    except AuthFailed as error:
        # The host key is checked before the login, so it was right. `check_service_login` reports this error.
        context.service_auth_error = error
    return msg(
        "doctor.pinned", "%(names)s, as pinned", names=", ".join(key.split()[0] for key in pinned)
    )


def check_service_login(context: CheckContext) -> str:
    name = context.cluster.service_user
    if context.service_auth_error is not None:
        raise CheckFailed(
            msg(
                "doctor.sshd-does-not-let",
                "sshd on %(host)s rejects the login of %(name)s.",
                host=context.cluster.host,
                name=name,
            ),
            _login_remedy(context.cluster, name),
        )
    transport = context.service_transport()
    account = context.service_account = fetch_passwd_entry(transport, transport.user)
    return msg("doctor.logged", "logged in as %(name)s", name=account.name)


def _login_remedy(cluster: Cluster, name: str) -> Message:
    if cluster.key_file:
        return msg(
            "doctor.see-readable-sluice-only",
            "Check that %(path)s exists, is readable by Sluice only, and that its public key is in ~%(name)s/.ssh/authorized_keys on the login node.",
            path=cluster.key_file.format(user=name),
            name=name,
        )
    return msg(
        "doctor.login-node-sshd-must",
        "The login node's sshd must trust Sluice's certificate authority (“manage.py ssh_ca” prints the lines for sshd_config; then reload sshd). The Unix user %(name)s must exist there and be allowed by AllowUsers, AllowGroups and PAM.",
        name=name,
    )


def check_accounts(context: CheckContext) -> str:
    """Check the UIDs of the service account and of the person, before the first login as that person."""
    entries = [context.service_account] if context.service_account else []
    if context.unix_user:
        context.account = fetch_passwd_entry(context.service_transport(), context.unix_user)
        entries.append(context.account)
    for account in entries:
        check_uid(account.name, account.uid, context.cluster.uid_floor)
    if context.account:
        check_may_act_as(context.cluster, context.account)
    uids = ", ".join(f"{account.name} {account.uid}" for account in entries)
    return msg(
        "doctor.not-below",
        "%(uids)s: not below %(uid_floor)s",
        uids=uids,
        uid_floor=context.cluster.uid_floor,
    )


def check_person_login(context: CheckContext) -> str:
    account = context.account
    if account is None:
        raise CheckFailed(
            msg(
                "doctor.nobody-try-no-member",
                "No account to test with: no member of a namespace has a Unix account on this cluster.",
            ),
            msg(
                "doctor.name-somebody-manage-py",
                "Name a person: manage.py cluster check %(name)s --user PERSON",
                name=context.cluster.name,
            ),
            CheckOutcome.NOT_TRIED,
        )
    try:
        result = context.user_transport().run(["id", "-u"])
    except AuthFailed as error:
        raise CheckFailed(
            msg(
                "doctor.sshd-lets-service-account",
                "sshd on %(host)s accepts the service account but rejects %(name)s.",
                host=context.cluster.host,
                name=account.name,
            ),
            _login_remedy(context.cluster, account.name),
        ) from error
    if result.text.strip() != str(account.uid):
        raise CheckFailed(
            msg(
                "doctor.logged-but-commands-run",
                "Logged in as %(name)s, but the commands run as UID %(uid)s.",
                name=account.name,
                uid=result.text.strip()[:40],
            ),
            msg(
                "doctor.look-forcecommand-shell-profile",
                "Check the login node for a ForceCommand or a shell profile that changes the user.",
            ),
        )
    return msg("doctor.logged", "logged in as %(name)s", name=account.name)


def check_clock(context: CheckContext) -> str:
    transport = context.service_transport()
    before = time.time()
    result = transport.run(["date", "+%s.%N"])
    midpoint = (before + time.time()) / 2
    try:
        skew = float(result.text) - midpoint
    except ValueError as error:
        raise CheckFailed(
            msg(
                "doctor.login-node-date-says",
                "“date” on the login node printed %(date)r.",
                date=result.text.strip()[:40],
            ),
            msg("doctor.gnu-date-expected-login", "Install GNU coreutils on the login node."),
        ) from error
    context.clock_skew_s = round(skew, 3)
    seconds = f"{abs(skew):.1f}"
    found = (
        msg("doctor.s-ahead-sluice", "%(seconds)s s ahead of Sluice", seconds=seconds)
        if skew > 0
        else msg("doctor.s-behind-sluice", "%(seconds)s s behind Sluice", seconds=seconds)
    )
    remedy = msg(
        "doctor.run-time-service-chrony",
        "Run a time service (chrony, systemd-timesyncd) on both machines.",
    )
    if abs(skew) >= SKEW_FAIL_S:
        raise CheckFailed(
            msg(
                "doctor.login-node-clock-certificates",
                "The login node's clock is %(found)s: certificates will be refused.",
                found=found,
            ),
            remedy,
        )
    if abs(skew) >= SKEW_WARN_S:
        raise CheckFailed(
            msg("doctor.login-node-clock", "The login node's clock is %(found)s.", found=found),
            remedy,
            CheckOutcome.WARN,
        )
    return found
