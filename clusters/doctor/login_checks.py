"""Checks of the connection to the login node: name, port, host key, logins, UIDs, clocks."""

from __future__ import annotations

import socket
import time

from clusters.connections import check_may_act_as, fetch_passwd_entry
from clusters.doctor.check_types import CheckContext, CheckFailed, CheckOutcome, FailureText
from clusters.errors import AuthFailed, HostKeyMismatch
from clusters.models import Cluster
from clusters.transport.identity import check_uid
from core.messages import Message, msg

PORT_TIMEOUT_S = 10.0
# sshd refuses a certificate if its clock is more than CLOCK_TOLERANCE_S (two minutes) behind, so the check fails before
# that. A skew of a few seconds already makes displayed times wrong.
SKEW_WARN_S, SKEW_FAIL_S = 2.0, 60.0

# --- what is reported if a check does not pass ---------------------------------------------------

HOST_NAME_UNKNOWN = FailureText(
    msg("doctor.does-not-resolve", "%(host)s does not resolve: %(reason)s."),
    msg(
        "doctor.correct-login-node-cluster",
        "Correct “login node” of the cluster, or the machine's DNS or /etc/hosts.",
    ),
)
_CHECK_SSHD = msg(
    "doctor.see-sshd-runs-listens",
    "Check that sshd runs on %(host)s, listens on port %(port)s and is not blocked by a firewall.",
)
PORT_NOT_RESPONDING = FailureText(
    msg("doctor.port-does-not-answer", "Port %(port)s of %(host)s does not respond."), _CHECK_SSHD
)
PORT_UNREACHABLE = FailureText(
    msg("doctor.port-2", "Port %(port)s of %(host)s: %(reason)s."), _CHECK_SSHD
)
PORT_WITHOUT_SSH = FailureText(
    msg("doctor.port-not-ssh-server", "Port %(port)s of %(host)s is not an SSH server."),
    msg("doctor.correct-ssh-port", "Correct the SSH port."),
)
NO_PINNED_KEY = FailureText(
    msg(
        "doctor.no-host-key-pinned",
        "No host key is pinned. Sluice connects only to hosts with a pinned key.",
    ),
    msg(
        "doctor.get-key-ssh-keyscan",
        "Get the key with “ssh-keyscan -p %(port)s %(host)s”, compare it on the login node "
        "itself, and enter it in “pinned host keys”.",
    ),
)
PIN_NEW_KEY = msg(
    "doctor.enter-new-key-pinned",
    "Enter the new key in “pinned host keys” only after you compared it on the login node itself.",
)
NO_TEST_ACCOUNT = FailureText(
    msg(
        "doctor.nobody-try-no-member",
        "No account to test with: no member of a namespace has a Unix account on this cluster.",
    ),
    msg(
        "doctor.name-somebody-manage-py",
        "Name a person: manage.py cluster check %(name)s --user PERSON",
    ),
    CheckOutcome.NOT_TRIED,
)
OTHER_UID_AFTER_LOGIN = FailureText(
    msg(
        "doctor.logged-but-commands-run",
        "Logged in as %(name)s, but the commands run as UID %(uid)s.",
    ),
    msg(
        "doctor.look-forcecommand-shell-profile",
        "Check the login node for a ForceCommand or a shell profile that changes the user.",
    ),
)
DATE_NOT_PARSED = FailureText(
    msg("doctor.login-node-date-says", "“date” on the login node printed %(date)r."),
    msg("doctor.gnu-date-expected-login", "Install GNU coreutils on the login node."),
)
_RUN_TIME_SERVICE = msg(
    "doctor.run-time-service-chrony",
    "Run a time service (chrony, systemd-timesyncd) on both machines.",
)
CLOCK_FAR_OFF = FailureText(
    msg(
        "doctor.login-node-clock-certificates",
        "The login node's clock is %(found)s: certificates will be refused.",
    ),
    _RUN_TIME_SERVICE,
)
CLOCK_OFF = FailureText(
    msg("doctor.login-node-clock", "The login node's clock is %(found)s."),
    _RUN_TIME_SERVICE,
    CheckOutcome.WARN,
)

# --- checks --------------------------------------------------------------------------------------


def check_host_name(context: CheckContext) -> str:
    host = context.cluster.host
    try:
        entries = socket.getaddrinfo(host, context.cluster.port, type=socket.SOCK_STREAM)
    except OSError as error:
        reason = error.strerror or error
        raise CheckFailed(HOST_NAME_UNKNOWN, host=host, reason=reason) from error
    return ", ".join(dict.fromkeys(str(entry[4][0]) for entry in entries))


def check_port(context: CheckContext) -> str:
    host, port = context.cluster.host, context.cluster.port
    try:
        with socket.create_connection((host, port), timeout=PORT_TIMEOUT_S) as connection:
            banner = connection.recv(255).split(b"\n")[0].decode("ascii", "replace").strip()
    except TimeoutError as error:
        raise CheckFailed(PORT_NOT_RESPONDING, host=host, port=port) from error
    except OSError as error:
        reason = error.strerror or error
        raise CheckFailed(PORT_UNREACHABLE, host=host, port=port, reason=reason) from error
    if not banner.startswith("SSH-"):
        raise CheckFailed(PORT_WITHOUT_SSH, host=host, port=port)
    return msg("doctor.port-open", "port %(port)s is open, %(banner)s", port=port, banner=banner)


def check_host_key(context: CheckContext) -> str:
    pinned = context.cluster.pinned_host_keys()
    if not pinned:
        raise CheckFailed(NO_PINNED_KEY, port=context.cluster.port, host=context.cluster.host)
    try:
        context.service_transport().run(["true"])
    except HostKeyMismatch as error:
        raise CheckFailed(FailureText(error.user_message, PIN_NEW_KEY)) from error
    except AuthFailed as error:
        # The host key is checked before the login, so it was right. `check_service_login` reports this error.
        context.service_auth_error = error
    return msg(
        "doctor.pinned", "%(names)s, as pinned", names=", ".join(key.split()[0] for key in pinned)
    )


def check_service_login(context: CheckContext) -> str:
    name = context.cluster.service_user
    if context.service_auth_error is not None:
        found = msg(
            "doctor.sshd-does-not-let",
            "sshd on %(host)s rejects the login of %(name)s.",
            host=context.cluster.host,
            name=name,
        )
        raise CheckFailed(FailureText(found, _login_remedy(context.cluster, name)))
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
        raise CheckFailed(NO_TEST_ACCOUNT, name=context.cluster.name)
    try:
        result = context.user_transport().run(["id", "-u"])
    except AuthFailed as error:
        found = msg(
            "doctor.sshd-lets-service-account",
            "sshd on %(host)s accepts the service account but rejects %(name)s.",
            host=context.cluster.host,
            name=account.name,
        )
        remedy = _login_remedy(context.cluster, account.name)
        raise CheckFailed(FailureText(found, remedy)) from error
    printed_uid = result.text.strip()
    if printed_uid != str(account.uid):
        raise CheckFailed(OTHER_UID_AFTER_LOGIN, name=account.name, uid=printed_uid[:40])
    return msg("doctor.logged", "logged in as %(name)s", name=account.name)


def check_clock(context: CheckContext) -> str:
    transport = context.service_transport()
    before = time.time()
    result = transport.run(["date", "+%s.%N"])
    midpoint = (before + time.time()) / 2
    try:
        skew_s = float(result.text) - midpoint
    except ValueError as error:
        raise CheckFailed(DATE_NOT_PARSED, date=result.text.strip()[:40]) from error
    context.clock_skew_s = round(skew_s, 3)
    seconds = f"{abs(skew_s):.1f}"
    found = (
        msg("doctor.s-ahead-sluice", "%(seconds)s s ahead of Sluice", seconds=seconds)
        if skew_s > 0
        else msg("doctor.s-behind-sluice", "%(seconds)s s behind Sluice", seconds=seconds)
    )
    if abs(skew_s) >= SKEW_FAIL_S:
        raise CheckFailed(CLOCK_FAR_OFF, found=found)
    if abs(skew_s) >= SKEW_WARN_S:
        raise CheckFailed(CLOCK_OFF, found=found)
    return found
